// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_meeting.h"
#include "lockstep/base/sockets/endpoint.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <future>
#include <set>
#include <thread>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// Of all machines here; each test that has others sets them.
class Told {
 public:
  explicit Told(const std::string& secret) { ::setenv("LOCKSTEP_SECRET", secret.c_str(), 1); }
  ~Told() { ::unsetenv("LOCKSTEP_SECRET"); }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
};
struct MeetingOfNodes : ::testing::Test {
  Told secret{std::string(64, 'a')};
};

NodeMeeting at_port(const ReservedPort& port, int least, int most) {
  return {.place = {"127.0.0.1", port.number()},
          .job = "a job",
          .least = least,
          .most = most,
          .timeout = milliseconds(20'000),
          .last_call = milliseconds(300)};
}

PlaceInJob place_in(const Roster& roster) { return place_of(roster.epoch, roster.me.id); }

std::vector<PlaceInJob> meet(const std::vector<NodeMeeting>& meetings) {
  std::vector<std::future<Roster>> launchers;
  for (const NodeMeeting& meeting : meetings) launchers.push_back(std::async(std::launch::async, meet_nodes, meeting));
  std::vector<PlaceInJob> places;
  for (auto& launcher : launchers) places.push_back(place_in(launcher.get()));
  return places;
}

TEST_F(MeetingOfNodes, gives_every_machine_a_place_and_its_ranks_their_numbers) {
  const ReservedPort port;
  std::vector<NodeMeeting> meetings(4, at_port(port, 4, 4));
  for (int i = 0; i < 4; ++i) meetings[static_cast<unsigned>(i)].ranks = i + 1;
  std::set<int> nodes;
  std::set<int> ranks;
  for (std::size_t i = 0; const PlaceInJob& place : meet(meetings)) {
    nodes.insert(place.node_rank);
    for (int rank = 0; rank < meetings[i].ranks; ++rank) ranks.insert(place.first_rank + rank);
    EXPECT_EQ(place.nodes, 4);
    EXPECT_EQ(place.world_size, 10);
    ++i;
  }
  EXPECT_EQ(nodes, (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_F(MeetingOfNodes, begins_with_fewer_machines_than_the_most) {
  const ReservedPort port;
  for (const PlaceInJob& place : meet({2, at_port(port, 2, 7)})) EXPECT_EQ(place.nodes, 2);
}

TEST_F(MeetingOfNodes, too_few_machines_are_an_error_at_the_deadline) {
  const ReservedPort port;
  NodeMeeting meeting = at_port(port, 2, 2);
  meeting.timeout = milliseconds(100);
  const std::string message = testing::message_of<RendezvousError>([&] { meet_nodes(meeting); });
  EXPECT_TRUE(testing::contains(message, "1 of at least 2 machines came")) << message;
}

TEST_F(MeetingOfNodes, refuses_another_job) {
  const ReservedPort port;
  NodeMeeting other = at_port(port, 2, 2);
  other.job = "another job";
  auto first = std::async(std::launch::async, meet_nodes, at_port(port, 2, 2));
  while (listener_of_port(port.number()).empty()) std::this_thread::yield();
  const std::string message = testing::message_of<RendezvousError>([&] { meet_nodes(other); });
  EXPECT_TRUE(testing::contains(message, "is not one of this job")) << message;
  EXPECT_EQ(place_in(meet_nodes(at_port(port, 2, 2))).node_rank, 1);
  EXPECT_EQ(place_in(first.get()).nodes, 2);
}

UniqueFd connection_to(const ReservedPort& port) {
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  for (;;)
    if (auto connected = connect_to(look_up({"127.0.0.1", port.number()}, deadline).addresses, deadline))
      return std::move(connected->fd);
}

// Who has no secret, or says nothing, or something else, keeps nobody out and takes nobody's place.
TEST_F(MeetingOfNodes, strangers_take_no_place_and_keep_nobody_out) {
  const ReservedPort port;
  auto first = std::async(std::launch::async, meet_nodes, at_port(port, 2, 2));
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connection_to(port));
  const std::string claim = "lockstep 1 2:2 5 a job ranks 1\n";
  for (std::size_t i = 0; i < strangers.size(); i += 2)
    ::send(strangers[i].get(), claim.data(), claim.size(), MSG_NOSIGNAL);
  std::array<char, 256> answer{};
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  do ASSERT_TRUE(wait_for(POLLIN, strangers[0].get(), deadline));
  while (::recv(strangers[0].get(), answer.data(), answer.size(), 0) > 0);
  NodeMeeting other = at_port(port, 2, 2);
  other.timeout = milliseconds(300);
  {
    const Told wrong(std::string(64, 'b'));
    const std::string message = testing::message_of<RendezvousError>([&] { meet_nodes(other); });
    EXPECT_TRUE(testing::contains(message, "was not let in at 127.0.0.1"));
  }
  const Told right(std::string(64, 'a'));
  EXPECT_EQ(place_in(meet_nodes(at_port(port, 2, 2))).node_rank, 1);
  EXPECT_EQ(place_in(first.get()).world_size, 2);
}

}  // namespace
}  // namespace lockstep
