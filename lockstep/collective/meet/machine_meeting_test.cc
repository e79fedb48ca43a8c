// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/machine_meeting.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <thread>

#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/store_client.h"
#include "lockstep/deadline.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kMeetingPatience = std::chrono::seconds(20);

// The process that listens there; 0: nobody.
pid_t listener_at(const std::string& address) try {
  const UniqueFd fd = connect_locally(address, SOCK_STREAM);
  ucred other{};
  socklen_t length = sizeof other;
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 ? other.pid : 0;
} catch (const SystemError&) {
  return 0;
}

// With names of jobs that no other process has.
struct MachineMeeting : ::testing::Test {
  static JobEnvironment job(int rank, int size, const std::string& id = "a job") {
    JobEnvironment environment;
    environment.rank = environment.local_rank = rank;
    environment.world_size = environment.local_size = size;
    environment.job_id = concat(id, " of ", ::getpid());
    return environment;
  }
  static std::future<Store> begin(const JobEnvironment& rank, milliseconds timeout = kMeetingPatience) {
    return std::async(std::launch::async, [=] { return meet_on_machine(rank, timeout); });
  }
  static std::vector<std::string> sockets() {
    std::vector<std::string> own = local_listeners(concat("@lockstep-meeting-", ::geteuid(), "-"));
    std::erase_if(own, [](const std::string& each) { return listener_at(each) != ::getpid(); });
    return own;
  }
  // The one at which rank 0 listens, once it does.
  static std::string socket() {
    for (;;)
      if (const auto all = sockets(); !all.empty()) return all.front();
  }
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
    EXPECT_EQ(sockets(), std::vector<std::string>());
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

TEST_F(MachineMeeting, jobs_of_one_name_may_follow_one_another_at_once) {
  for (int i = 0; i < 50; ++i) {
    auto first = begin(job(0, 2));
    begin(job(1, 2)).get();
    EXPECT_TRUE(first.get());
  }
}

TEST_F(MachineMeeting, says_who_is_missing_at_the_deadline) {
  const auto message = [](int rank) {
    return testing::message_of<RendezvousError>([rank] { meet_on_machine(job(rank, 3), milliseconds(100)); });
  };
  EXPECT_TRUE(testing::contains(message(0), "only 1 of 3 ranks came"));
  EXPECT_TRUE(testing::contains(message(1), "rank 1 found no rank 0 of job a job of"));
}

// As another user, which needs root. The child's exit code is what `body` returns.
pid_t fork_stranger(const std::function<int()>& body) {
  const pid_t stranger = ::fork();
  if (stranger != 0) return stranger;
  if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
  ::_exit(body());
}

TEST_F(MachineMeeting, another_user_is_ignored) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  auto first = begin(job(0, 2));
  const std::string address = socket();
  const pid_t stranger = fork_stranger([&] {
    auto channel = std::make_unique<Channel>(connect_locally(address, SOCK_STREAM));
    return MeetingClient::join(std::move(channel), Deadline::after(kMeetingPatience)) ? 1 : 0;
  });
  int status = -1;
  ::waitpid(stranger, &status, 0);
  EXPECT_EQ(status, 0) << "let in, or could not try";
  begin(job(1, 2)).get();
  EXPECT_TRUE(first.get());
}

TEST_F(MachineMeeting, a_name_that_another_user_has_taken_is_skipped) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  auto before = begin(job(0, 2));
  const std::string address = socket();
  begin(job(1, 2)).get();
  before.get();
  const pid_t stranger = fork_stranger([&] {
    const UniqueFd taken = listen_locally(address, SOCK_STREAM), also = listen_locally(address + "-0", SOCK_STREAM);
    return ::pause();
  });
  while (listener_at(address + "-0") != stranger) std::this_thread::yield();
  auto first = begin(job(0, 2));
  while (sockets().empty()) std::this_thread::yield();
  EXPECT_THROW(meet_on_machine(job(0, 2), kMeetingPatience), RendezvousError) << "a second rank 0";
  begin(job(1, 2)).get();
  EXPECT_TRUE(first.get());
  ::kill(stranger, SIGKILL);
  ::waitpid(stranger, nullptr, 0);
}

}  // namespace
}  // namespace lockstep
