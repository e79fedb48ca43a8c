// SPDX-License-Identifier: Apache-2.0
// Tests that strangers can't reach Gloo's connections. tests/security/tensors_test.sh has the attacks over a network, and the tunnel
// between machines: here all are in one network namespace, in which Gloo connects by itself.
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

#include "lockstep/base/sockets/port.h"
#include "lockstep/collective/machines/link.h"
#include "lockstep/collective/machines/listener_filter.h"
#include "lockstep/collective/machines/tunnel.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using MeetingPlace = c10::intrusive_ptr<c10d::Store>;

TransportOptions options_of_rank(int rank) {
  return {.rank = rank, .size = 2, .describe = "rank " + std::to_string(rank), .timeout = std::chrono::seconds(20)};
}

std::string error_of_link(const MeetingPlace& store, int rank) {
  return testing::message_of<RendezvousError>([&] { GlooLink(store, options_of_rank(rank), {"rank 0", "rank 1"}); });
}

using Identity = std::shared_ptr<TlsIdentity>;

Tunnel tunnel_of(const Identity& identity, const std::string& own) { return {identity, "127.0.0.1", own, 1}; }

TEST(Tunnel, answers_who_has_a_key_that_it_was_told_of_and_whose_key_is_known_to_that_one) {
  const auto own = std::make_shared<TlsIdentity>(), other = std::make_shared<TlsIdentity>();
  const auto stranger = std::make_shared<TlsIdentity>();
  own->trust({own->fingerprint(), other->fingerprint()});
  other->trust({own->fingerprint(), other->fingerprint()});
  stranger->trust({own->fingerprint(), stranger->fingerprint()});
  Tunnel listening = tunnel_of(own, "127.64.0.1"), of_stranger = tunnel_of(stranger, "127.64.0.3");
  listening.start({}, {});
  of_stranger.start({}, {});
  const auto soon = [] { return Deadline::after(std::chrono::seconds(20)); };
  const Tunnel friendly = tunnel_of(other, "127.64.0.2");
  EXPECT_EQ(friendly.try_to_reach(listening.endpoint(), soon()), "");
  EXPECT_TRUE(testing::contains(of_stranger.try_to_reach(listening.endpoint(), soon()), "no key of this job"));
  EXPECT_TRUE(testing::contains(friendly.try_to_reach(of_stranger.endpoint(), soon()), "no key of this job"));
  EXPECT_EQ(friendly.try_to_reach(listening.endpoint(), soon()), "");  // a stranger does not end it
}

TEST(Tunnel, says_that_a_port_is_taken_and_who_does_not_answer) {
  const auto identity = std::make_shared<TlsIdentity>();
  Tunnel tunnel = tunnel_of(identity, "127.64.0.1");
  const UniqueFd silent = listen_at(address_of_number({"127.64.0.2", 0}));
  const Endpoint taken = endpoint_of(silent.get());
  EXPECT_FALSE(tunnel.listen_for(taken));
  EXPECT_EQ(tunnel.try_to_reach(taken, Deadline::after(std::chrono::milliseconds(300))), "it does not answer");
}

TEST(GlooNetwork, is_refused_to_a_rank_that_trusts_the_network_other_than_the_rest) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/gloo/1", std::string("insecure"));
  const std::string error = error_of_link(store, 0);
  EXPECT_TRUE(testing::contains(error, "rank 1 runs with --insecure-network, and this rank does not")) << error;
}

// Both send more than sockets hold, before either receives the other's.
TEST(GlooNetwork, carries_large_messages_in_both_directions_at_once) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  const auto exchange = [&](int rank) {
    GlooLink link(store, options_of_rank(rank), {"rank 0", "rank 1"});
    std::vector<std::byte> mine(size_t{64} << 20, std::byte(rank + 1));
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

TEST(GlooNetwork, carries_more_than_two_gibibytes) {
  const MeetingPlace store = c10::make_intrusive<c10d::HashStore>();
  constexpr size_t kBytes = (size_t{2} << 30) + 4096, kBlock = 4096;
  const auto number = [](size_t at) { return std::byte(at / kBlock * 7 % 251); };
  const auto carry = [&](int rank) {
    TransportOptions options = options_of_rank(rank);
    options.timeout = std::chrono::minutes(5);
    GlooLink link(store, options, {"rank 0", "rank 1"});
    const std::unique_ptr<std::byte[]> data(new std::byte[kBytes]);
    GlooLink::Transfers transfers;
    if (rank == 0)
      for (size_t at = 0; at < kBytes; at += kBlock) std::fill_n(&data[at], kBlock, number(at));
    if (rank == 0)
      link.send(1, data.get(), kBytes, transfers);
    else
      link.receive(0, data.get(), kBytes, transfers);
    link.wait(transfers);
    size_t wrong = 0;
    for (size_t at = 0; at < kBytes; at += kBlock)
      wrong += data[at] != number(at) || data[at + kBlock - 1] != number(at);
    EXPECT_EQ(wrong, 0U) << "blocks on rank " << rank;
  };
  std::thread other([&] { carry(1); });
  carry(0);
  other.join();
}

// ---- Listeners that connections share

// Returns the places at which sockets of this process listen over IPv4.
std::set<std::string> listening_places() {
  std::set<std::string> places;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    sockaddr_storage own{};
    length = sizeof own;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
    if (own.ss_family == AF_INET) places.insert(endpoint_of(fd).text());
  }
  return places;
}

sockaddr_in address_of(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::inet_addr(host.c_str());
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

const sockaddr* raw(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

bool connects(const sockaddr_in& from, const sockaddr_in& to, int milliseconds) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int yes = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  EXPECT_EQ(::bind(fd.get(), raw(from), sizeof from), 0);
  ::connect(fd.get(), raw(to), sizeof to);
  pollfd connected{.fd = fd.get(), .events = POLLOUT, .revents = 0};
  return ::poll(&connected, 1, milliseconds) == 1 && (connected.revents & POLLERR) == 0;
}

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
      GlooLink& link = *links[static_cast<size_t>(i)];
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
  const std::set<std::string> before = listening_places();
  std::barrier<> both(2);
  const auto run_rank = [&](int rank) {
    const auto first = first_link(rank);
    const Links made = links(rank, "link ", first->network());
    expect_that_each_carries_its_number(made);
    both.arrive_and_wait();
    if (rank == 0) {
      std::set<std::string> places = listening_places();
      for (const std::string& place : before) places.erase(place);
      EXPECT_GE(places.size(), 2U);
      EXPECT_LE(places.size(), 2 * std::min<size_t>(usable_cores().size(), 1 + kLinks));
      for (const std::string& place : places) {
        const size_t colon = place.rfind(':');
        const sockaddr_in there = address_of(place.substr(0, colon), std::stoi(place.substr(colon + 1)));
        EXPECT_FALSE(connects(address_of("127.0.0.1", 0), there, 200)) << place;
      }
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

// ---- The filter

TEST(ListenerFilter, admits_the_given_ends_and_later_nobody) {
  UniqueFd listener = listen_at(address_of_number({"127.64.0.9", 0}));
  ASSERT_TRUE(listener);
  const Endpoint own = endpoint_of(listener.get());
  const sockaddr_in there = address_of(own.host, own.port);
  const ReservedPort port("127.64.0.9");
  const auto from = [&](const std::string& host, int number = 0) { return address_of(host, number); };
  constexpr int kLong = 10000, kShort = 200;
  EXPECT_TRUE(connects(from("127.0.0.2"), there, kLong));
  admit_only({{"10.1.2.3", 0}, {"127.0.0.1", 0}, {"127.64.0.9", port.number()}, {"fe80::1", 0}}, listener);
  EXPECT_TRUE(connects(from("127.0.0.1"), there, kLong));
  EXPECT_FALSE(connects(from("127.0.0.2"), there, kShort));
  EXPECT_FALSE(connects(from("127.64.0.9"), there, kShort));
  EXPECT_TRUE(connects(from("127.64.0.9", port.number()), there, kLong));
  admit_only({}, listener);
  EXPECT_FALSE(connects(from("127.0.0.1"), there, kShort));
}

}  // namespace
}  // namespace lockstep
