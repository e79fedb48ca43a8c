// SPDX-License-Identifier: Apache-2.0
// What keeps strangers out of Gloo's connections. tests/security/tensors_test.sh has the attacks over a network.
#include "lockstep/collective/machines/gloo_device.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <barrier>
#include <filesystem>
#include <memory>
#include <set>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/collective/machines/gloo_identity.h"
#include "lockstep/collective/machines/link.h"
#include "lockstep/collective/machines/listener_filter.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using MeetingPlace = c10::intrusive_ptr<c10d::Store>;

// Of somebody who changes what a rank tells the others: as PyTorch's TCPStore lets anybody do.
class ForgedStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    std::string text(value.begin(), value.end());
    if (key == "lockstep/gloo/1") text = text.substr(0, text.find('\n') + 1) + GlooIdentity().certificate();
    PrefixStore::set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
  }
};

TransportOptions options_of_rank(int rank) {
  return {.rank = rank, .size = 2, .describe = "rank " + std::to_string(rank), .timeout = std::chrono::seconds(20)};
}

std::string error_of_link(const MeetingPlace& store, int rank) {
  return testing::message_of<RendezvousError>([&] { GlooLink(store, options_of_rank(rank), {"rank 0", "rank 1"}); });
}

TEST(GlooDevice, does_not_connect_to_a_rank_without_the_certificate_that_it_has_told) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  std::string error;
  std::thread other([&] { error = error_of_link(c10::make_intrusive<ForgedStore>("x", store), 1); });
  const std::string own = error_of_link(c10::make_intrusive<c10d::PrefixStore>("x", store), 0);
  other.join();
  EXPECT_TRUE(testing::contains(own, "can't connect")) << own;
  EXPECT_TRUE(testing::contains(error, "can't connect")) << error;
}

TEST(GlooDevice, is_refused_to_a_rank_that_trusts_the_network_other_than_the_rest) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/gloo/1", std::string("insecure"));
  const std::string error = error_of_link(store, 0);
  EXPECT_TRUE(testing::contains(error, "rank 1 runs with --insecure-network, and this rank does not")) << error;
}

// Both send more than sockets hold, before either receives the other's.
TEST(GlooDevice, carries_large_messages_in_both_directions_at_once) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  const auto exchange = [&](int rank) {
    GlooLink link(store, options_of_rank(rank), {"rank 0", "rank 1"});
    std::vector<std::byte> mine(std::size_t{64} << 20, std::byte(rank + 1));
    std::vector<std::byte> theirs(mine.size());
    GlooLink::Transfers transfers;
    for (int turn = 0; turn < 3; ++turn) {
      link.receive(1 - rank, theirs.data(), theirs.size(), transfers);
      link.send(1 - rank, mine.data(), mine.size(), transfers);
      link.wait(transfers);
    }
    EXPECT_EQ(theirs, std::vector<std::byte>(mine.size(), std::byte(2 - rank)));
  };
  std::thread other([&] { exchange(1); });
  exchange(0);
  other.join();
}

// Gloo's TLS counts the bytes of a message in 31 bits.
TEST(GlooDevice, carries_more_than_two_gibibytes) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  constexpr std::size_t kBytes = (std::size_t{2} << 30) + 4096, kBlock = 4096;
  const auto number = [](std::size_t at) { return std::byte(at / kBlock * 7 % 251); };
  const auto carry = [&](int rank) {
    TransportOptions options = options_of_rank(rank);
    options.timeout = std::chrono::minutes(5);
    GlooLink link(store, options, {"rank 0", "rank 1"});
    const std::unique_ptr<std::byte[]> data(new std::byte[kBytes]);
    GlooLink::Transfers transfers;
    if (rank == 0)
      for (std::size_t at = 0; at < kBytes; at += kBlock) std::fill_n(&data[at], kBlock, number(at));
    if (rank == 0)
      link.send(1, data.get(), kBytes, transfers);
    else
      link.receive(0, data.get(), kBytes, transfers);
    link.wait(transfers);
    std::size_t wrong = 0;
    for (std::size_t at = 0; at < kBytes; at += kBlock)
      wrong += data[at] != number(at) || data[at + kBlock - 1] != number(at);
    EXPECT_EQ(wrong, 0U) << "blocks on rank " << rank;
  };
  std::thread other([&] { carry(1); });
  carry(0);
  other.join();
}

// ---- Listeners that connections share

// Ports of this process at which a socket listens.
std::set<int> listening_ports() {
  std::set<int> ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    sockaddr_in own{};
    length = sizeof own;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
    ports.insert(ntohs(own.sin_port));
  }
  return ports;
}

bool connects(std::uint32_t from, const sockaddr_in& to, int milliseconds);
sockaddr_in loopback_address(std::uint32_t last, std::uint16_t port);

class SharedNetwork : public ::testing::Test {
 protected:
  static constexpr int kLinks = 5;
  using Links = std::vector<std::unique_ptr<GlooLink>>;

  // Of a rank, in a network that they share; `name`: the others' have it, too.
  Links links(int rank, const std::string& name, std::shared_ptr<GlooNetwork> network) const {
    TransportOptions options = options_of_rank(rank);
    options.network = std::move(network);
    Links made;
    for (int i = 0; i < kLinks; ++i)
      made.push_back(std::make_unique<GlooLink>(
          c10::make_intrusive<c10d::PrefixStore>(name + std::to_string(i), store_), options, kNames));
    return made;
  }

  std::unique_ptr<GlooLink> first_link(int rank) const {
    return std::make_unique<GlooLink>(store_, options_of_rank(rank), kNames);
  }

  static void expect_that_each_carries_its_number(const Links& links) {
    for (int i = 0; i < kLinks; ++i) {
      GlooLink& link = *links[static_cast<std::size_t>(i)];
      std::vector<std::byte> mine(1000, std::byte(2 * i + link.rank())), theirs(mine.size());
      GlooLink::Transfers transfers;
      link.receive(1 - link.rank(), theirs.data(), theirs.size(), transfers);
      link.send(1 - link.rank(), mine.data(), mine.size(), transfers);
      link.wait(transfers);
      EXPECT_EQ(theirs, std::vector<std::byte>(mine.size(), std::byte(2 * i + 1 - link.rank())));
    }
  }

  const std::vector<std::string> kNames{"rank 0", "rank 1"};
  const MeetingPlace store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(SharedNetwork, has_no_more_listeners_than_cores_and_they_admit_nobody) {
  const std::set<int> before = listening_ports();
  std::barrier<> both(2);
  const auto run_rank = [&](int rank) {
    const auto first = first_link(rank);
    const Links made = links(rank, "link ", first->network());
    expect_that_each_carries_its_number(made);
    both.arrive_and_wait();
    if (rank == 0) {
      std::set<int> ports = listening_ports();
      for (const int port : before) ports.erase(port);
      EXPECT_GE(ports.size(), 2U);
      EXPECT_LE(ports.size(), 2 * std::min<std::size_t>(usable_cores().size(), 1 + kLinks));
      for (const int port : ports)
        EXPECT_FALSE(connects(1, loopback_address(1, htons(static_cast<std::uint16_t>(port))), 200));
    }
    both.arrive_and_wait();
  };
  std::thread other([&] { run_rank(1); });
  run_rank(0);
  other.join();
}

TEST_F(SharedNetwork, connects_for_several_threads_at_once) {
  const auto run_rank = [&](int rank) {
    const auto first = first_link(rank);
    std::thread another([&] { expect_that_each_carries_its_number(links(rank, "another ", first->network())); });
    expect_that_each_carries_its_number(links(rank, "link ", first->network()));
    another.join();
  };
  std::thread other([&] { run_rank(1); });
  run_rank(0);
  other.join();
}

TEST_F(SharedNetwork, outlives_a_connection_that_is_lost) {
  std::barrier<> both(2);
  const auto run_rank = [&](int rank) {
    const auto first = first_link(rank);
    Links made = links(rank, "link ", first->network());
    both.arrive_and_wait();
    if (rank == 0) made.front()->close(std::make_exception_ptr(std::runtime_error("on purpose")));
    std::byte data{};
    GlooLink::Transfers transfers;
    if (rank == 1) {
      const auto receive = [&] {  // which may find the connection closed before it begins to wait
        made.front()->receive(0, &data, 1, transfers);
        made.front()->wait(transfers);
      };
      EXPECT_THROW(receive(), PeerLost);
    }
    made.front() = std::make_unique<GlooLink>(
        c10::make_intrusive<c10d::PrefixStore>("again", store_),
        [&] {
          TransportOptions options = options_of_rank(rank);
          options.network = first->network();
          return options;
        }(),
        kNames);
    expect_that_each_carries_its_number(made);
  };
  std::thread other([&] { run_rank(1); });
  run_rank(0);
  other.join();
}

// ---- The filter, on the loopback interface: 127.0.0.2 is a stranger

sockaddr_in loopback_address(std::uint32_t last, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(0x7f000000 | last);
  address.sin_port = port;
  return address;
}

const sockaddr* raw(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

bool connects(std::uint32_t from, const sockaddr_in& to, int milliseconds) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const sockaddr_in own = loopback_address(from, 0);
  EXPECT_EQ(::bind(fd.get(), raw(own), sizeof own), 0);
  ::connect(fd.get(), raw(to), sizeof to);
  pollfd connected{.fd = fd.get(), .events = POLLOUT, .revents = 0};
  return ::poll(&connected, 1, milliseconds) == 1 && (connected.revents & POLLERR) == 0;
}

TEST(ListenerFilter, admits_the_given_addresses_and_later_nobody) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback_address(1, 0);
  ASSERT_EQ(::bind(listener.get(), raw(address), sizeof address), 0);
  ASSERT_EQ(::listen(listener.get(), 16), 0);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length), 0);
  std::memcpy(&address, &bound, sizeof address);

  const ListenerFilter filter(bound);
  constexpr int kLong = 10000, kShort = 200;
  EXPECT_TRUE(connects(2, address, kLong));
  filter.admit_only({"10.1.2.3", "127.0.0.1", "fe80::1"});
  EXPECT_TRUE(connects(1, address, kLong));
  EXPECT_FALSE(connects(2, address, kShort));
  filter.admit_nobody();
  EXPECT_FALSE(connects(1, address, kShort));
}

}  // namespace
}  // namespace lockstep
