// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machine_meeting.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <future>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/connect/local_socket.h"
#include "lockstep/collective/store/store_client.h"
#include "lockstep/deadline.h"
#include "tests/support.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kMeetingPatience = std::chrono::seconds(20);

// Meets in a folder of its own.
struct MachineMeeting : ::testing::Test {
  MachineMeeting() { ::setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1); }
  ~MachineMeeting() override { ::unsetenv("XDG_RUNTIME_DIR"); }

  static JobEnvironment job(int rank, int size, const std::string& id = "a job") {
    JobEnvironment environment;
    environment.rank = environment.local_rank = rank;
    environment.world_size = environment.local_size = size;
    environment.job_id = id;
    return environment;
  }
  static std::future<Store> begin(const JobEnvironment& rank, milliseconds timeout = kMeetingPatience) {
    return std::async(std::launch::async, [=] { return meet_on_machine(rank, timeout); });
  }
  // The socket at which rank 0 listens. Between its bind and its listen rank 0 holds a lock, which this takes in turn.
  fs::path socket() const {
    const fs::path inside = folder / concat("lockstep-", ::geteuid());
    for (;;) {
      const UniqueFd turn(::open(inside.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      std::error_code ignored;
      if (turn && ::flock(turn.get(), LOCK_SH) == 0)
        for (const auto& entry : fs::directory_iterator(inside, ignored)) return entry.path();
    }
  }
  bool has_socket() const { return !fs::is_empty(folder / concat("lockstep-", ::geteuid())); }

  testing::TempFolder folder;
};

TEST_F(MachineMeeting, joins_ranks_whichever_comes_first) {
  for (const bool first_is_late : {false, true}) {
    std::vector<std::future<Store>> ranks(3);
    for (const int rank : first_is_late ? std::vector{2, 1, 0} : std::vector{0, 1, 2})
      ranks[static_cast<unsigned>(rank)] = begin(job(rank, 3));
    std::vector<Store> stores;
    for (auto& rank : ranks) stores.push_back(rank.get());
    stores[1]->set("key", "value");
    EXPECT_EQ(stores[2]->get_to_str("key"), "value");
    EXPECT_EQ(stores[0]->clone()->get_to_str("key"), "value");
    EXPECT_FALSE(has_socket());
  }
}

TEST_F(MachineMeeting, jobs_with_other_names_do_not_meet) {
  auto one = begin(job(0, 2, "one")), other = begin(job(0, 2, "other"));
  EXPECT_NE(begin(job(1, 2, "one")).get()->get_to_str("rank/0/1"), "");
  begin(job(1, 2, "other")).get();
  one.get();
  other.get();
}

TEST_F(MachineMeeting, a_second_rank_0_of_one_name_is_refused_and_disturbs_nobody) {
  auto first = begin(job(0, 2));
  static_cast<void>(socket());
  const std::string message =
      testing::message_of<RendezvousError>([] { meet_on_machine(job(0, 2), kMeetingPatience); });
  EXPECT_TRUE(testing::contains(message, concat("pid ", ::getpid())));
  begin(job(1, 2)).get();
  EXPECT_TRUE(first.get());
}

TEST_F(MachineMeeting, replaces_the_socket_of_a_rank_0_that_was_killed) {
  const std::string path = [&] {
    auto first = begin(job(0, 2));
    const std::string there = socket();
    begin(job(1, 2)).get();
    first.get();
    return there;
  }();
  listen_locally(path, SOCK_STREAM).reset();  // bound, and nobody listens any more
  auto again = begin(job(0, 2));
  begin(job(1, 2)).get();
  EXPECT_TRUE(again.get());
}

TEST_F(MachineMeeting, says_who_is_missing_at_the_deadline) {
  const auto message = [](int rank) {
    return testing::message_of<RendezvousError>([rank] { meet_on_machine(job(rank, 3), milliseconds(100)); });
  };
  EXPECT_TRUE(testing::contains(message(0), "only 1 of 3 ranks came"));
  EXPECT_TRUE(testing::contains(message(1), "rank 1 found no rank 0 of job a job on this machine"));
}

// Needs to be root: becomes another user, who finds all doors open.
TEST_F(MachineMeeting, another_user_is_not_heard) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  auto first = begin(job(0, 2));
  const fs::path path = socket();
  for (const fs::path& open : {folder.path() / fs::path(), path.parent_path(), path}) ::chmod(open.c_str(), 0777);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    MeetingClient client(std::make_unique<Channel>(connect_locally(path, SOCK_STREAM)));
    ::_exit(client.hello(Deadline::after(kMeetingPatience)) ? 1 : 0);
  }
  int status = -1;
  ::waitpid(stranger, &status, 0);
  EXPECT_EQ(status, 0) << "let in, or could not try";
  ::chmod(path.parent_path().c_str(), 0700);
  begin(job(1, 2)).get();
  EXPECT_TRUE(first.get());
}

}  // namespace
}  // namespace lockstep
