// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <random>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "agent/meet/tls_channel.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/job_store.h"
#include "lockstep/collective/meet/rendezvous.h"
#include "lockstep/collective/meet/store_client.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStorePatience = std::chrono::seconds(20);

const std::string kOneSecret(64, 'a');
const std::string kOtherSecret(64, 'b');

// Until this goes, what JobSecret finds in the environment; "": an insecure network.
class SecretTold {
 public:
  explicit SecretTold(const std::string& secret) {
    ::setenv("LOCKSTEP_INSECURE_NETWORK", secret.empty() ? "1" : "0", 1);
    ::setenv("LOCKSTEP_SECRET", secret.c_str(), 1);
  }
  ~SecretTold() {
    ::unsetenv("LOCKSTEP_INSECURE_NETWORK");
    ::unsetenv("LOCKSTEP_SECRET");
  }
  SecretTold(const SecretTold&) = delete;
  SecretTold& operator=(const SecretTold&) = delete;
};

struct ServedStore : ::testing::TestWithParam<std::string> {
  SecretTold told{GetParam()};
  UniqueFd listener = listen_on({"127.0.0.1", 0}, Deadline::after(kStorePatience));
  Endpoint endpoint = endpoint_of(listener.get());
  c10::intrusive_ptr<c10d::Store> store = serve_store(std::move(listener), secret_of({}, ""), kStorePatience);

  c10::intrusive_ptr<c10d::Store> join(milliseconds timeout = kStorePatience) const {
    return join_store(endpoint, {}, secret_of({}, ""), timeout);
  }
  UniqueFd connection() const {
    const Deadline deadline = Deadline::after(kStorePatience);
    return std::move(connect_to(resolve(endpoint, deadline), deadline)->fd);
  }
  // The other end closes it, whatever it says before.
  static bool is_closed(const UniqueFd& fd) {
    char byte = 0;
    const Deadline deadline = Deadline::after(kStorePatience / 4);
    while (wait_for(POLLIN, fd.get(), deadline))
      if (::recv(fd.get(), &byte, 1, 0) <= 0) return true;
    return false;
  }
};
INSTANTIATE_TEST_SUITE_P(WorldStore, ServedStore, ::testing::Values("", kOneSecret),
                         [](const auto& told) { return told.param.empty() ? "insecure" : "secured"; });

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// As torch's store in memory: the same calls, the same answers.
TEST_P(ServedStore, answers_as_the_stores_of_c10d) {
  const auto peer = c10::make_intrusive<c10d::HashStore>();
  const auto joined = join();
  const auto on_both = [&](auto call) { EXPECT_EQ(call(*joined), call(*peer)); };
  on_both([](c10d::Store& s) { return s.add("number", 5) + s.add("number", -7); });
  on_both([](c10d::Store& s) { return s.get("number"); });
  on_both([](c10d::Store& s) { return s.compareSet("key", "", "one"); });
  on_both([](c10d::Store& s) { return s.compareSet("key", "two", "three"); });
  on_both([](c10d::Store& s) { return s.compareSet("key", "one", "three"); });
  on_both([](c10d::Store& s) { return s.compareSet("none", "one", "three"); });
  on_both([](c10d::Store& s) { return s.check({"key", "number"}) && !s.check({"key", "none"}); });
  on_both([](c10d::Store& s) { return s.getNumKeys(); });
  on_both([](c10d::Store& s) { return s.deleteKey("key") && !s.deleteKey("key"); });
  on_both([](c10d::Store& s) { return s.append("list", bytes("ab")), s.append("list", bytes("c")), s.get("list"); });
  on_both([](c10d::Store& s) { return s.multiSet({"x", "y"}, {bytes("1"), {}}), s.multiGet({"y", "x", "list"}); });
}

TEST_P(ServedStore, a_get_waits_until_another_rank_sets_it) {
  const auto joined = join();
  std::thread later([&] { store->set("key", "value"); });
  EXPECT_EQ(joined->get_to_str("key"), "value");
  later.join();
  joined->setTimeout(milliseconds(20));
  EXPECT_THROW(joined->get("never"), c10::DistStoreError);
  EXPECT_EQ(joined->get_to_str("key"), "value") << "still of use";
}

TEST_P(ServedStore, what_would_fill_the_memory_is_refused_and_the_rest_stays) {
  const auto joined = join();
  joined->set("key", "value");
  const std::vector<uint8_t> large(PacketStream::kLongestPacket / 2);
  const size_t room = StoreTable::kMostBytes / large.size();
  EXPECT_THROW(
      {
        for (size_t i = 0; i <= room; ++i) joined->set(concat("large", i), large);
      },
      c10::DistStoreError);
  EXPECT_EQ(store->get_to_str("key"), "value");
  EXPECT_TRUE(joined->deleteKey("large0"));
  joined->set("more", "value");
}

TEST_P(ServedStore, who_has_not_said_hello_is_disconnected_at_the_first_wrong_byte) {
  const Packet first_is_no_hello{.kind = Packet::Kind::kDelete, .texts = {"key"}};
  store->set("key", "value");
  for (const std::string& said : {encode(first_is_no_hello), std::string(16, '\x7f'), std::string(64, '\0')}) {
    const UniqueFd fd = connection();
    ASSERT_EQ(::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL), std::ssize(said));
    EXPECT_TRUE(is_closed(fd)) << said.size();
  }
  EXPECT_EQ(store->get_to_str("key"), "value");
}

TEST_P(ServedStore, idle_connections_keep_no_rank_out) {
  std::vector<UniqueFd> idle;
  for (size_t i = 0; i < 4 * MeetingServer::kMostNewcomers; ++i) idle.push_back(connection());
  EXPECT_TRUE(is_closed(idle.front())) << "the oldest made room";
  const auto joined = join();
  joined->set("key", "value");
  EXPECT_EQ(store->get_to_str("key"), "value");
}

// Of ranks that were let in: what they say is checked, too.
TEST_P(ServedStore, random_bytes_end_a_connection_and_nothing_else) {
  std::mt19937 random(1);
  const auto joined = join();
  for (int round = 0; round < testing::rounds("LOCKSTEP_STORE_FUZZ", 2000); ++round) {
    std::string said = random() % 2 == 0 ? encode({.kind = Packet::Kind::kHello}) : "";
    if (random() % 2 == 0) said += encode({.kind = Packet::Kind(random() % 19), .texts = {"key", "other"}});
    for (size_t i = random() % 64; i > 0; --i) said += static_cast<char>(random());
    for (size_t i = random() % 3; i > 0 && !said.empty(); --i)
      said[random() % said.size()] = static_cast<char>(random());
    const UniqueFd fd = connection();
    ::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
  }
  joined->set("mine", "value");
  EXPECT_EQ(store->get_to_str("mine"), "value");
}

TEST_P(ServedStore, lets_nobody_in_who_has_another_secret_or_none) {
  for (const std::string& other : {std::string(), kOneSecret, kOtherSecret}) {
    if (other == GetParam()) continue;
    const SecretTold tells(other);
    const std::string message = testing::message_of<RendezvousError>([&] { join(milliseconds(300)); });
    EXPECT_TRUE(testing::contains(message, "was refused"));
    EXPECT_EQ(message.find(kOneSecret), std::string::npos);
  }
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST_P(ServedStore, nobody_connects_after_the_start) {
  const auto joined = join();
  let_nobody_else_in(*store);
  const Deadline deadline = Deadline::after(kStorePatience);
  const AddressList addresses = resolve(endpoint, deadline);
  while (connect_to(addresses, deadline)) ASSERT_FALSE(deadline.passed());
  joined->set("key", "value");
  EXPECT_EQ(store->get_to_str("key"), "value");
}

// What the attacks above and in tests/security/attack.py would do to the store that torch's ranks meet at.
TEST(StoreOfC10d, lets_in_whoever_connects_at_any_time_to_read_delete_replace_and_fill) {
  c10d::TCPStoreOptions serving{.port = 0, .isServer = true, .waitWorkers = false};
  const auto served = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", serving);
  const c10::intrusive_ptr<c10d::Store> own = served;
  own->set("address of rank 1", "the right one");
  const c10d::TCPStoreOptions joining{.port = served->getPort(), .waitWorkers = false};
  const c10::intrusive_ptr<c10d::Store> strangers = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", joining);
  EXPECT_EQ(strangers->get_to_str("address of rank 1"), "the right one");
  strangers->set("address of rank 1", "a stranger");
  EXPECT_EQ(own->get_to_str("address of rank 1"), "a stranger");
  EXPECT_TRUE(strangers->deleteKey("address of rank 1"));
  const std::vector<uint8_t> large(size_t{2} << 20);
  for (int i = 0; i < 70; ++i) strangers->set(concat("large", i), large);  // more than ours keeps
  EXPECT_EQ(strangers->getNumKeys(), 70);
}

TEST_P(ServedStore, a_rank_learns_that_rank_0_has_gone) {
  const auto joined = join();
  store.reset();
  EXPECT_THROW(joined->set("key", "value"), c10::DistNetworkError);
}

// ---- What somebody on the way sees and can do

// A connection through somebody who sees all bytes: both ends, and what went from the first to the second.
template <class Ends>
struct Wiretapped {
  Ends ends;
  std::array<std::array<int, 2>, 2> wires{};
  std::unique_ptr<Channel> client, server;
  std::string seen;
  bool spoils = false;

  explicit Wiretapped(const Ends& make) : ends(make) {
    for (auto& wire : wires) EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, wire.data()), 0);
    client = ends(UniqueFd(wires[0][0]), TlsChannel::Role::kClient);
    server = ends(UniqueFd(wires[1][0]), TlsChannel::Role::kServer);
  }
  ~Wiretapped() {
    for (const auto& wire : wires) ::close(wire[1]);
  }
  void carry() {
    std::array<char, 65536> room;
    for (const bool forth : {true, false}) {
      const ssize_t count = ::recv(wires[forth ? 0 : 1][1], room.data(), room.size(), 0);
      if (count <= 0) continue;
      if (forth) seen.append(room.data(), static_cast<size_t>(count));
      if (forth && spoils) room[static_cast<size_t>(count) - 1] ^= 1;
      ::send(wires[forth ? 1 : 0][1], room.data(), static_cast<size_t>(count), MSG_NOSIGNAL);
    }
  }
  // What arrives of a text; nothing: the other end has refused it.
  std::optional<std::string> say(const std::string& text) {
    std::string rest = text, heard;
    for (int turn = 0; turn < 100 && heard.size() < text.size(); ++turn) {
      std::array<char, 256> room;
      const auto written = client->write(rest);
      if (written) rest.erase(0, *written);
      carry();
      const auto read = server->read(room);
      if (!read) return std::nullopt;
      heard.append(room.data(), *read);
    }
    return heard;
  }
};

std::unique_ptr<Channel> plain(UniqueFd fd, TlsChannel::Role) { return std::make_unique<Channel>(std::move(fd)); }

std::unique_ptr<Channel> secured(UniqueFd fd, TlsChannel::Role role) {
  return std::make_unique<TlsChannel>(std::move(fd), Secret{7}, role);
}

TEST(ConnectionOverheard, shows_what_is_said_without_a_secret_and_not_with_it) {
  const std::string pattern = "a pattern that is easily found";
  Wiretapped open(&plain), closed(&secured);
  EXPECT_EQ(open.say(pattern), pattern);
  EXPECT_EQ(closed.say(pattern), pattern);
  EXPECT_NE(open.seen.find(pattern), std::string::npos);
  EXPECT_EQ(closed.seen.find(pattern), std::string::npos);
}

// Without it, whoever learns the secret could read what was recorded before.
TEST(ConnectionOverheard, begins_with_a_diffie_hellman_exchange_and_offers_nothing_else) {
  Wiretapped closed(&secured);
  EXPECT_EQ(closed.say("said"), "said");
  const std::string modes("\x00\x2d\x00\x02\x01\x01", 6);  // TLS's psk_key_exchange_modes: psk_dhe_ke alone
  EXPECT_NE(closed.seen.find(modes), std::string::npos);
}

TEST(ConnectionOverheard, a_changed_byte_is_noticed_and_an_old_conversation_is_no_use) {
  Wiretapped first(&secured), again(&secured);
  EXPECT_EQ(first.say("said once"), "said once");
  ::send(again.wires[1][1], first.seen.data(), first.seen.size(), MSG_NOSIGNAL);
  std::array<char, 256> room;
  EXPECT_EQ(again.server->read(room).value_or(0), 0U) << "a replay";
  first.spoils = true;
  EXPECT_EQ(first.say("spoilt"), std::nullopt);
}

}  // namespace
}  // namespace lockstep
