// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/keeper.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Kind = Packet::Kind;

// A launcher with one rank, which says packets to its keeper.
struct KeeperOfOneRank : ::testing::Test {
  std::vector<std::string> heard;
  Keeper keeper{[this](int seat, int generation) { heard.push_back(concat("met ", seat, " ", generation)); },
                [this](int seat, int generation) { heard.push_back(concat("next ", seat, " ", generation)); }};
  UniqueFd rank = connect_locally(split(keeper.address(3), ' ').front());

  void say(const Packet& packet, const std::vector<int>& descriptors = {}) {
    ASSERT_TRUE(send_packet(rank.get(), packet, Deadline::after(milliseconds(1000)), descriptors));
    keeper.read_all();
  }
  void keep(int generation, const std::string& name, off_t size) {
    const UniqueFd memory(::memfd_create("kept", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(memory.get(), size), 0);
    say({Kind::kKeep, generation, {"0", name}}, {memory.get()});
  }
  std::optional<Packet> next(std::vector<UniqueFd>& descriptors) const {
    Packet packet;
    const bool came = receive_packet(rank.get(), packet, descriptors) == Incoming::kMessage;
    return came ? std::optional(packet) : std::nullopt;
  }
};

TEST_F(KeeperOfOneRank, gives_the_memory_of_the_newest_complete_generation_before) {
  for (const int generation : {0, 1, 2}) keep(generation, concat("state ", generation), 100 + generation);
  say({Kind::kComplete, 1, {"3"}});
  say({Kind::kFetch, 3, {}});
  std::vector<UniqueFd> descriptors;
  EXPECT_EQ(next(descriptors)->texts, (std::vector<std::string>{"0", "state 1"}));
  struct stat info {};
  ASSERT_EQ(descriptors.size(), 1U);
  ASSERT_EQ(::fstat(descriptors[0].get(), &info), 0);
  EXPECT_EQ(info.st_size, 101);
  EXPECT_EQ(next(descriptors)->kind, Kind::kDone);
  say({Kind::kFetch, 1, {}});
  EXPECT_EQ(next(descriptors)->kind, Kind::kDone) << "nothing is older";
}

TEST_F(KeeperOfOneRank, tells_who_waits_its_variables_whole_and_nobody_else) {
  const Variables variables = {
      {"RANK", "1"}, {"MASTER_ADDR", std::string(4000, 'a')}, {"EMPTY", ""}, {"TWO", "a\nb=c"}};
  keeper.tell(3, 1, variables);
  std::vector<UniqueFd> none;
  EXPECT_FALSE(next(none)) << "it has not asked";
  say({Kind::kMet, 0, {"3"}});
  say({Kind::kNext, 0, {"3"}});
  EXPECT_EQ(heard, (std::vector<std::string>{"met 3 0", "next 3 0"}));
  keeper.tell(2, 1, variables);
  keeper.tell(3, 1, variables);
  const auto told = next(none);
  ASSERT_TRUE(told && told->texts.size() == 2 * variables.size());
  for (size_t i = 0; i < variables.size(); ++i) {
    EXPECT_EQ(told->texts[2 * i], variables[i].first);
    EXPECT_EQ(told->texts[2 * i + 1], variables[i].second);
  }
  EXPECT_FALSE(next(none)) << "once";
}

TEST_F(KeeperOfOneRank, disconnects_who_says_something_else) {
  const UniqueFd memory(::memfd_create("kept", MFD_CLOEXEC));
  say({Kind::kKeep, 0, {"no name"}}, {memory.get()});
  say({Kind::kComplete, 0, {}});
  say({Kind::kFetch, 1, {}});
  std::vector<UniqueFd> none;
  EXPECT_EQ(next(none)->kind, Kind::kDone) << "nothing was kept";
  EXPECT_TRUE(none.empty());
  ASSERT_EQ(::send(rank.get(), "hello", 5, MSG_NOSIGNAL), 5);
  keeper.read_all();
  char byte = 0;
  EXPECT_EQ(::recv(rank.get(), &byte, 1, 0), 0);
}

}  // namespace
}  // namespace lockstep
