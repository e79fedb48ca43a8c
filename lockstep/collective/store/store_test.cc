// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/job_store.h"
#include "lockstep/collective/store/store_client.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStorePatience = std::chrono::seconds(20);

struct ServedStore : ::testing::Test {
  UniqueFd listener = listen_on({"127.0.0.1", 0}, Deadline::after(kStorePatience));
  Endpoint endpoint = endpoint_of(listener);
  c10::intrusive_ptr<c10d::Store> store = serve_store(std::move(listener), kStorePatience);

  c10::intrusive_ptr<c10d::Store> join() const { return join_store(endpoint, {}, kStorePatience); }
  UniqueFd connection() const {
    return std::move(
        connect_to(resolve(endpoint, Deadline::after(kStorePatience)), Deadline::after(kStorePatience))->fd);
  }
  // The other end has closed it.
  static bool is_closed(const UniqueFd& fd) {
    char byte = 0;
    return wait_for(POLLIN, fd.get(), Deadline::after(kStorePatience)) && ::recv(fd.get(), &byte, 1, 0) <= 0;
  }
};

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// As torch's store in memory: the same calls, the same answers.
TEST_F(ServedStore, answers_as_the_stores_of_c10d) {
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

TEST_F(ServedStore, a_get_waits_until_another_rank_sets_it) {
  const auto joined = join();
  std::thread later([&] { store->set("key", "value"); });
  EXPECT_EQ(joined->get_to_str("key"), "value");
  later.join();
  joined->setTimeout(milliseconds(20));
  EXPECT_THROW(joined->get("never"), c10::DistStoreError);
  EXPECT_EQ(joined->get_to_str("key"), "value") << "still of use";
}

TEST_F(ServedStore, what_would_fill_the_memory_is_refused_and_the_rest_stays) {
  const auto joined = join();
  joined->set("key", "value");
  const std::vector<std::uint8_t> large(PacketStream::kLongestPacket / 2);
  const std::size_t room = StoreTable::kMostBytes / large.size();
  EXPECT_THROW(
      {
        for (std::size_t i = 0; i <= room; ++i) joined->set(concat("large", i), large);
      },
      c10::DistStoreError);
  EXPECT_EQ(store->get_to_str("key"), "value");
  EXPECT_TRUE(joined->deleteKey("large0"));
  joined->set("more", "value");
}

TEST_F(ServedStore, who_has_not_said_hello_is_disconnected_at_the_first_wrong_byte) {
  const Packet first_is_no_hello{.kind = Packet::Kind::kDelete, .texts = {"key"}};
  store->set("key", "value");
  for (const std::string& said : {encode(first_is_no_hello), std::string("\xff\xff\xff\x7f"), std::string(64, '\0')}) {
    const UniqueFd fd = connection();
    ASSERT_EQ(::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL), std::ssize(said));
    EXPECT_TRUE(is_closed(fd)) << said.size();
  }
  EXPECT_EQ(store->get_to_str("key"), "value");
}

TEST_F(ServedStore, idle_connections_keep_no_rank_out) {
  std::vector<UniqueFd> idle;
  for (std::size_t i = 0; i < 4 * StoreServer::kMostNewcomers; ++i) idle.push_back(connection());
  EXPECT_TRUE(is_closed(idle.front())) << "the oldest made room";
  const auto joined = join();
  joined->set("key", "value");
  EXPECT_EQ(store->get_to_str("key"), "value");
}

// Of ranks that were let in: what they say is checked, too.
TEST_F(ServedStore, random_bytes_end_a_connection_and_nothing_else) {
  std::mt19937 random(1);
  const auto joined = join();
  for (int round = 0; round < testing::rounds("LOCKSTEP_STORE_FUZZ", 2000); ++round) {
    std::string said = random() % 2 == 0 ? encode({.kind = Packet::Kind::kHello}) : "";
    if (random() % 2 == 0) said += encode({.kind = Packet::Kind(random() % 14), .texts = {"key", "other"}});
    for (std::size_t i = random() % 64; i > 0; --i) said += static_cast<char>(random());
    for (std::size_t i = random() % 3; i > 0 && !said.empty(); --i)
      said[random() % said.size()] = static_cast<char>(random());
    const UniqueFd fd = connection();
    ::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
  }
  joined->set("mine", "value");
  EXPECT_EQ(store->get_to_str("mine"), "value");
}

TEST_F(ServedStore, a_rank_learns_that_rank_0_has_gone) {
  const auto joined = join();
  store.reset();
  EXPECT_THROW(joined->set("key", "value"), c10::DistNetworkError);
}

}  // namespace
}  // namespace lockstep
