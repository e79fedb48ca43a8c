// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/own_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <shared_mutex>
#include <thread>

namespace lockstep {
namespace {

// What body() returns in a forked child.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // instead of a wait for ever
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct Counted {
  explicit Counted(int& ends) : destroyed(ends) {}
  ~Counted() { ++destroyed; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int& destroyed;
};

TEST(OwnProcess, destroys_what_it_made) {
  int destroyed = 0;
  OwnedHere<Counted> object = std::make_unique<Counted>(destroyed);
  object.reset();
  EXPECT_EQ(destroyed, 1);
}

TEST(OwnProcess, leaves_its_parents_objects_alone_but_destroys_its_own) {
  int destroyed = 0;
  OwnedHere<Counted> object = std::make_unique<Counted>(destroyed);
  const int in_forked_child = in_child([&] {
    object.reset();
    if (destroyed != 0) return 1;
    OwnedHere<Counted> own = std::make_unique<Counted>(destroyed);
    const int in_its_child = in_child([&] {
      own.reset();
      return destroyed;
    });
    own.reset();
    return in_its_child == 0 && destroyed == 1 ? 0 : 2;
  });
  EXPECT_EQ(in_forked_child, 0);
  EXPECT_NE(object, nullptr);
}

std::shared_mutex& the_mutex() {
  static auto* const mutex = new std::shared_mutex;
  return *mutex;
}

TEST(OwnProcess, finds_a_mutex_unlocked_that_another_thread_of_the_parent_uses) {
  hold_during_fork<std::shared_mutex, &the_mutex>();
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      const std::unique_lock lock(the_mutex());
    }
  });
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(in_child([] {
                const std::unique_lock once(the_mutex());
                return 0;
              }),
              0);
  stop = true;
  other.join();
  ASSERT_TRUE(the_mutex().try_lock());
  the_mutex().unlock();  // a later fork() locks it
}

}  // namespace
}  // namespace lockstep
