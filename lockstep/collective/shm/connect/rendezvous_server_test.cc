// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/rendezvous_server.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <random>
#include <thread>

#include "agent/meet/packet_stream.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/observe/rank_progress.h"
#include "tests/shm/support.h"
#include "tests/support.h"

namespace lockstep::shm {
namespace {

using lockstep::testing::contains;
using lockstep::testing::message_of;
using testing::exit_code_of;
using testing::fork_child;
using testing::open_descriptors;
using testing::run_processes;
using testing::soon;

int sum_is_right(Group& group) {
  int sum = group.rank() + 1;
  group.run({.operation = Operation::kAllReduce, .input = &sum, .output = &sum, .count = 1, .dtype = DType::kInt32});
  return sum == group.size() * (group.size() + 1) / 2 ? 0 : 1;
}

class Rendezvous : public ::testing::Test {
 protected:
  static bool is_listening(const std::string& address) {
    return std::ranges::count(local_listeners("@lockstep-shm-"), address) > 0;
  }
};

class RendezvousSizes : public Rendezvous, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Shm, RendezvousSizes, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(RendezvousSizes, connects_processes) {
  EXPECT_EQ(run_processes(GetParam(), sum_is_right), IntVector<int>(GetParam(), 0));
}

TEST_F(Rendezvous, leaves_no_descriptor_mapping_or_socket) {
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);) found += line.find("memfd:lockstep") != std::string::npos ? 1 : 0;
    return found;
  };
  observe::record();  // its page stays until the process ends
  const int mappings_before = mappings();
  const auto before = open_descriptors();
  {
    RendezvousServer server(2);
    EXPECT_TRUE(is_listening(server.address()));
    const pid_t peer = fork_child([&] {
      const GroupPtr owner = join_rendezvous(server.address(), 1, 2, soon());
      Group& group = *owner;
      const int code = sum_is_right(group);
      group.leave();
      return code;
    });
    const GroupPtr owner = server.connect(soon());
    Group& group = *owner;
    EXPECT_EQ(sum_is_right(group), 0);
    EXPECT_GT(mappings(), mappings_before);
    group.leave();
    EXPECT_EQ(exit_code_of(peer), 0);  // which has a copy of the socket
    EXPECT_FALSE(is_listening(server.address()));
  }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(mappings(), mappings_before);
  { const auto groups = make_thread_group(3); }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(mappings(), mappings_before);
}

TEST_F(Rendezvous, names_the_ranks_that_did_not_come) {
  RendezvousServer server(4);
  const std::string message =
      message_of<RendezvousError>([&] { server.connect(Deadline::after(std::chrono::milliseconds(50))); });
  EXPECT_TRUE(contains(message, "ranks that did not come: 1, 2, 3 of 4"));
}

TEST_F(Rendezvous, a_peer_without_a_host_fails_at_once) {
  const std::string message =
      message_of<RendezvousError>([&] { join_rendezvous("@lockstep-shm-nobody", 1, 2, soon()); });
  EXPECT_TRUE(contains(message, "can't connect to"));
}

TEST_F(Rendezvous, garbage_on_the_socket_disturbs_nobody) {
  RendezvousServer server(2);
  const pid_t vandal = fork_child([&] {
    std::mt19937 random(1);
    int learned = 0;
    for (int i = 0; i < 100; ++i) {
      const UniqueFd socket = connect_locally(server.address());
      std::vector<char> noise(random() % 300 + 1);
      for (char& one : noise) one = static_cast<char>(random());
      const bool whole = i % 2 == 0;  // or it says what it should, and lacks a descriptor
      const Packet almost{.kind = Packet::Kind::kHello,
                          .number = static_cast<int64_t>(random() % 4),
                          .texts = {concat("4 2 ", whole ? 12345 : control_bytes(2))}};
      if (i % 3 == 0)
        send_packet(socket.get(), almost, soon(), std::vector<int>(whole ? 2 : 1, socket.get()));
      else if (i % 3 == 1)
        (void)!::write(socket.get(), noise.data(), noise.size());
      if (i % 3 == 2) continue;  // says nothing, goes
      if (wait_for(POLLIN, socket.get(), soon()) && ::read(socket.get(), noise.data(), 1) > 0) ++learned;
    }
    return learned;
  });
  std::vector<pid_t> ranks;
  ranks.push_back(fork_child([&] {
    const GroupPtr owner = server.connect(soon());
    Group& group = *owner;
    const int code = sum_is_right(group);
    group.leave();
    return code;
  }));
  EXPECT_EQ(exit_code_of(vandal), 0);
  ranks.push_back(fork_child([&] {
    const GroupPtr owner = join_rendezvous(server.address(), 1, 2, soon());
    Group& group = *owner;
    const int code = sum_is_right(group);
    group.leave();
    return code;
  }));
  for (const pid_t pid : ranks) EXPECT_EQ(exit_code_of(pid), 0);
}

TEST_F(Rendezvous, a_peer_of_another_size_or_rank_is_refused) {
  RendezvousServer server(2);
  const pid_t stranger = fork_child([&] {
    for (const auto& [rank, size] : {std::pair{1, 3}, {2, 2}, {0, 2}}) {
      const std::string message =
          message_of<RendezvousError>([&] { join_rendezvous(server.address(), rank, size, soon()); });
      if (!contains(message, "rank 0 closed the connection")) return 1;
    }
    return 0;
  });
  EXPECT_THROW(server.connect(Deadline::after(std::chrono::milliseconds(500))), RendezvousError);
  EXPECT_EQ(exit_code_of(stranger), 0);
}

TEST_F(Rendezvous, a_peer_that_dies_while_connecting_may_be_replaced) {
  RendezvousServer server(2);
  const pid_t first = fork_child([&] {  // says hello and dies
    join_rendezvous(server.address(), 1, 2, Deadline::after(std::chrono::milliseconds(1)));
    return 0;
  });
  EXPECT_EQ(exit_code_of(first), 99);
  const pid_t second = fork_child([&] {
    const GroupPtr owner = join_rendezvous(server.address(), 1, 2, soon());
    Group& group = *owner;
    const int code = sum_is_right(group);
    group.leave();
    return code;
  });
  const GroupPtr owner = server.connect(soon());
  Group& group = *owner;
  EXPECT_EQ(sum_is_right(group), 0);
  group.leave();
  EXPECT_EQ(exit_code_of(second), 0);
}

// As many as there is room for, and more: those wait in turn.
TEST_F(Rendezvous, connects_where_others_fill_the_queue) {
  const std::string address = new_local_address("@lockstep-test-");
  const UniqueFd listener = listen_locally(address);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  std::vector<UniqueFd> others;
  try {
    for (int i = 0; i < 100; ++i) others.push_back(connect_locally(address));
    FAIL() << "the queue has no end";
  } catch (const SystemError&) {
  }
  std::thread late([&] { EXPECT_NO_THROW(connect_locally(address, SOCK_SEQPACKET, soon())); });
  for (size_t accepted = 0; accepted <= others.size();)
    if (accept_locally(listener.get())) ++accepted;
  late.join();
}

// Needs to be root: becomes another user.
TEST_F(Rendezvous, another_user_gets_nothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  RendezvousServer server(2);
  const auto as_nobody = [](const std::function<int()>& body) {
    return exit_code_of(fork_child([&] { return ::setgid(65534) != 0 || ::setuid(65534) != 0 ? 98 : body(); }));
  };
  const pid_t patient = fork_child([&] {
    try {
      server.connect(Deadline::after(std::chrono::milliseconds(500)));
    } catch (const RendezvousError&) {
      return 0;
    }
    return 1;
  });
  EXPECT_EQ(as_nobody([&] {
              try {
                join_rendezvous(server.address(), 1, 2, soon());
                return 1;
              } catch (const RendezvousError& error) {
                return contains(error.what(), "another user") ? 0 : 2;
              }
            }),
            0);
  EXPECT_EQ(exit_code_of(patient), 0);
}

// All ranks of `size` in processes of their own; the sum of 1 from each, or 0 if one failed.
int sum_over_processes(int size) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  RendezvousServer server(size);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank)
    pids.push_back(fork_child([&, rank] {
      const GroupPtr owner =
          rank == 0 ? server.connect(deadline) : join_rendezvous(server.address(), rank, size, deadline);
      Group& group = *owner;
      int64_t one = 1;
      group.run(
          {.operation = Operation::kAllReduce, .input = &one, .output = &one, .count = 1, .dtype = DType::kInt64});
      group.barrier();
      return one == size ? 0 : 1;
    }));
  int sum = 0;
  for (const pid_t pid : pids) sum += exit_code_of(pid) == 0 ? 1 : 0;
  return sum;
}

// The kernel counts the descriptors that such a user has on their way through sockets, too.
TEST_F(Rendezvous, joins_128_ranks_of_an_ordinary_user_who_may_open_1024_files) {
  constexpr int kRanks = LOCKSTEP_TEST_PATIENCE > 1 ? 16 : 128;  // a sanitizer's processes are large
  EXPECT_EQ(exit_code_of(fork_child([] {
              const rlimit limit{.rlim_cur = 1024, .rlim_max = 1024};
              if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 97;
              if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 98;
              return sum_over_processes(kRanks) == kRanks ? 0 : 1;
            })),
            0);
}

// With the usual limit of open files, and one of addresses as a batch system may set it (ulimit -v).
TEST_F(Rendezvous, holds_200_groups_of_4_ranks_at_once) {
  constexpr int kRanks = 4, kGroups = LOCKSTEP_TEST_PATIENCE > 1 ? 20 : 200;
  std::deque<RendezvousServer> servers;
  for (int i = 0; i < kGroups; ++i) servers.emplace_back(kRanks, Options{.staging_bytes = 4096});
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.push_back(fork_child([&, rank] {
      rlimit files{};
      ::getrlimit(RLIMIT_NOFILE, &files);
      files.rlim_cur = std::min<rlim_t>(files.rlim_max, 1024);
      ::setrlimit(RLIMIT_NOFILE, &files);
      const rlimit addresses{.rlim_cur = rlim_t{100} << 30, .rlim_max = rlim_t{100} << 30};
      if (LOCKSTEP_TEST_PATIENCE == 1) ::setrlimit(RLIMIT_AS, &addresses);  // a sanitizer needs more
      std::vector<GroupPtr> groups;
      for (RendezvousServer& server : servers)
        groups.push_back(rank == 0 ? server.connect(soon()) : join_rendezvous(server.address(), rank, kRanks, soon()));
      int wrong = 0;
      for (const GroupPtr& group : groups) {
        std::vector<int32_t> data(20'000, rank + 1);
        group->run({.operation = Operation::kAllReduce,
                    .input = data.data(),
                    .output = data.data(),
                    .count = data.size(),
                    .dtype = DType::kInt32});
        wrong += std::ranges::count(data, 10) == std::ssize(data) ? 0 : 1;
      }
      for (const GroupPtr& group : groups) group->leave();
      return std::min(wrong, 50);
    }));
  for (const pid_t pid : ranks) EXPECT_EQ(exit_code_of(pid), 0);
}

TEST_F(Rendezvous, says_so_when_descriptors_run_out) {
  const int code = exit_code_of(fork_child([] {
    const rlimit limit{.rlim_cur = 8, .rlim_max = 8};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    try {
      make_thread_group(16);
    } catch (const SystemError& error) {
      return contains(error.what(), "Too many open files") && contains(error.what(), "limit of 8 open files") ? 0 : 1;
    }
    return 2;
  }));
  EXPECT_EQ(code, 0);
}

// The rank without descriptors says so; the others learn that it is gone, at once.
TEST_F(Rendezvous, a_peer_without_descriptors_fails_all) {
  RendezvousServer server(3);
  std::vector<pid_t> peers;
  for (int rank = 1; rank < 3; ++rank)
    peers.push_back(fork_child([&, rank] {
      const auto room = static_cast<rlim_t>(open_descriptors() + 3);
      const rlimit limit{.rlim_cur = room, .rlim_max = room};
      if (rank == 2) ::setrlimit(RLIMIT_NOFILE, &limit);
      try {
        join_rendezvous(server.address(), rank, 3, soon());
      } catch (const SystemError& error) {
        return rank == 2 && contains(error.what(), "Too many open files") ? 0 : 1;
      } catch (const RendezvousError&) {
        return rank == 1 ? 0 : 2;
      }
      return 3;
    }));
  const pid_t first = fork_child([&] {
    try {
      server.connect(soon());
    } catch (const RendezvousError& error) {
      return contains(error.what(), "rank 2 was lost") ? 0 : 1;
    }
    return 2;
  });
  EXPECT_EQ(exit_code_of(first), 0);
  for (const pid_t pid : peers) EXPECT_EQ(exit_code_of(pid), 0);
}

}  // namespace
}  // namespace lockstep::shm
