// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/machines.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <set>
#include <thread>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

// The secret of all machines here; a test that has others sets them.
class Told {
 public:
  explicit Told(const std::string& secret) { ::setenv("LOCKSTEP_SECRET", secret.c_str(), 1); }
  ~Told() { ::unsetenv("LOCKSTEP_SECRET"); }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
};

// A launcher on another machine is a process here: it writes the place that it gets, and ends when its input does.
class Launcher {
 public:
  Launcher(const Meeting& meeting, const Machines::OpenStore& open) {
    auto [ours, theirs] = connected_pair();
    ours_ = std::move(ours);
    const int fd = theirs.get();
    process_.emplace(ProcessOptions{.body = [&] { return run(meeting, open, fd); }, .keeps = std::set{fd}});
  }

  // The next line it says; "": none in time, or it has ended.
  std::string next() {
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    for (size_t end = 0;;) {
      if ((end = said_.find('\n')) != std::string::npos) {
        const std::string line = said_.substr(0, end);
        said_.erase(0, end + 1);
        return line;
      }
      std::array<char, 256> room{};
      if (!wait_for(POLLIN, ours_.get(), deadline)) return "";
      const ssize_t bytes = ::recv(ours_.get(), room.data(), room.size(), 0);
      if (bytes <= 0) return "";
      said_.append(room.data(), static_cast<size_t>(bytes));
    }
  }
  void say(char what) { EXPECT_EQ(::send(ours_.get(), &what, 1, MSG_NOSIGNAL), 1); }
  void kill(int signal) { ::kill(process_->pid(), signal); }

 private:
  static int run(const Meeting& meeting, const Machines::OpenStore& open, int fd) {
    const auto say = [fd](const std::string& line) {
      (void)!::send(fd, (line + "\n").data(), line.size() + 1, MSG_NOSIGNAL);
    };
    try {
      Machines machines(meeting, open);
      const auto say_place = [&](const Epoch& epoch) {
        say(concat("epoch ", epoch.number, " machine ", machines.node_rank(), " of ", epoch.members.size(), " first ",
                   epoch.first_rank(machines.me().id), " of ", epoch.world_size(), " restarts ", epoch.restarts));
      };
      say_place(machines.epoch());
      for (;;) {
        std::vector<Event> events = machines.events();
        char wish = 0;
        events.push_back({fd, POLLIN, [&] {
                            if (::recv(fd, &wish, 1, 0) <= 0) wish = 'q';
                          }});
        poll_events(events, 100);
        machines.work();
        if (const auto epoch = machines.take_news()) say_place(*epoch);
        if (wish == 'r') machines.want_restart();
        if (wish == 'l') machines.want_to_leave();
        if (wish == 'f') machines.finish();
        if (wish == 'e') machines.end_job("no restarts are left");
        if (wish == 'q') return 0;
        if (machines.end() || machines.all_done()) break;
      }
      say(machines.all_done() ? "over" : "ended: " + *machines.end());
    } catch (const Error& error) {
      say(concat(error.kind(), ": ", error.text().what));
    }
    return 0;
  }

  UniqueFd ours_;
  std::optional<Process> process_;
  std::string said_;
};

struct JobOfMachines : ::testing::Test {
  Told secret{std::string(64, 'c')};
  ReservedPort port;

  Meeting meeting(int least, int most, int ranks = 1) const {
    return {.places = {{"127.0.0.1", port.number()}},
            .job = "a job",
            .least = least,
            .most = most,
            .ranks = ranks,
            .replaces = true,
            .timeout = milliseconds(20'000),
            .last_call = milliseconds(300)};
  }
  std::unique_ptr<Launcher> start(const Meeting& meeting) {
    return std::make_unique<Launcher>(meeting, open_first_machine_store);
  }
  void wait_until_somebody_listens() {
    const AddressList place = address_of_number({"127.0.0.1", port.number()});
    while (!connect_to(place, Deadline::after(std::chrono::seconds(1)))) std::this_thread::yield();
  }
};

TEST_F(JobOfMachines, gives_every_machine_a_place_and_its_ranks_their_numbers) {
  std::vector<std::unique_ptr<Launcher>> launchers;
  for (int ranks = 1; ranks <= 4; ++ranks) launchers.push_back(start(meeting(4, 4, ranks)));
  std::set<std::string> places;
  std::set<int> firsts;
  for (auto& each : launchers) {
    const auto words = split(each->next(), ' ');
    ASSERT_EQ(words.size(), 12U);
    places.insert(words[3]);
    EXPECT_EQ(words[5], "4");
    EXPECT_EQ(words[9], "10");
    firsts.insert(std::stoi(words[7]));
  }
  EXPECT_EQ(places, (std::set<std::string>{"0", "1", "2", "3"}));
  EXPECT_EQ(firsts.size(), 4U);
}

TEST_F(JobOfMachines, a_restart_that_one_wants_is_one_of_all) {
  auto first = start(meeting(2, 2));
  wait_until_somebody_listens();
  auto second = start(meeting(2, 2));
  EXPECT_EQ(first->next(), "epoch 0 machine 0 of 2 first 0 of 2 restarts 0");
  EXPECT_EQ(second->next(), "epoch 0 machine 1 of 2 first 1 of 2 restarts 0");
  second->say('r');
  EXPECT_EQ(first->next(), "epoch 1 machine 0 of 2 first 0 of 2 restarts 1");
  EXPECT_EQ(second->next(), "epoch 1 machine 1 of 2 first 1 of 2 restarts 1");
}

TEST_F(JobOfMachines, goes_on_without_a_launcher_that_is_killed_and_takes_it_in_again) {
  auto first = start(meeting(1, 2));
  wait_until_somebody_listens();
  auto second = start(meeting(1, 2));
  EXPECT_EQ(first->next(), "epoch 0 machine 0 of 2 first 0 of 2 restarts 0");
  EXPECT_EQ(second->next(), "epoch 0 machine 1 of 2 first 1 of 2 restarts 0");
  second->kill(SIGKILL);
  EXPECT_EQ(first->next(), "epoch 1 machine 0 of 1 first 0 of 1 restarts 0");
  second = start(meeting(1, 2));
  EXPECT_EQ(second->next(), "epoch 2 machine 1 of 2 first 1 of 2 restarts 0");
  EXPECT_EQ(first->next(), "epoch 2 machine 0 of 2 first 0 of 2 restarts 0");
}

TEST_F(JobOfMachines, goes_on_without_a_launcher_that_leaves) {
  auto first = start(meeting(1, 2));
  wait_until_somebody_listens();
  auto second = start(meeting(1, 2));
  EXPECT_EQ(first->next(), "epoch 0 machine 0 of 2 first 0 of 2 restarts 0");
  EXPECT_EQ(second->next(), "epoch 0 machine 1 of 2 first 1 of 2 restarts 0");
  second->say('l');
  EXPECT_EQ(first->next(), "epoch 1 machine 0 of 1 first 0 of 1 restarts 0");
  EXPECT_EQ(second->next(), "ended: the other machines go on without this one, in generation 1");
}

TEST_F(JobOfMachines, ends_when_the_first_machine_is_lost) {
  auto first = start(meeting(1, 2));
  wait_until_somebody_listens();
  auto second = start(meeting(1, 2));
  EXPECT_NE(second->next(), "");
  first->kill(SIGKILL);
  EXPECT_TRUE(testing::contains(second->next(), "it has lost the first machine, 127.0.0.1"));
}

TEST_F(JobOfMachines, ends_everywhere_when_one_ends_it) {
  auto first = start(meeting(2, 2));
  auto second = start(meeting(2, 2));
  EXPECT_NE(first->next(), "");
  EXPECT_NE(second->next(), "");
  second->say('e');
  EXPECT_EQ(first->next(), "ended: no restarts are left");
  EXPECT_EQ(second->next(), "ended: no restarts are left");
}

TEST_F(JobOfMachines, is_over_when_each_has_finished) {
  auto first = start(meeting(2, 2));
  auto second = start(meeting(2, 2));
  EXPECT_NE(first->next(), "");
  EXPECT_NE(second->next(), "");
  first->say('f');
  second->say('f');
  EXPECT_EQ(first->next(), "over");
  EXPECT_EQ(second->next(), "over");
}

TEST_F(JobOfMachines, too_few_machines_are_an_error_at_the_deadline) {
  Meeting alone = meeting(2, 2);
  alone.timeout = milliseconds(300);
  EXPECT_TRUE(testing::contains(start(alone)->next(), "RendezvousError: 1 of at least 2 machines came"));
}

TEST_F(JobOfMachines, refuses_another_job) {
  auto first = start(meeting(2, 2));
  wait_until_somebody_listens();
  Meeting other = meeting(2, 2);
  other.job = "another job";
  EXPECT_TRUE(testing::contains(start(other)->next(), "is not one of this job"));
  auto second = start(meeting(2, 2));
  EXPECT_EQ(second->next(), "epoch 0 machine 1 of 2 first 1 of 2 restarts 0");
}

TEST_F(JobOfMachines, without_restarts_a_machine_that_comes_late_is_told_so) {
  Meeting fixed = meeting(1, 2);
  fixed.replaces = false;
  auto first = start(fixed);
  EXPECT_NE(first->next(), "");
  EXPECT_TRUE(testing::contains(start(fixed)->next(), "runs without this machine"));
}

// Without look_up, whose thread may still live when the next launcher forks (ThreadSanitizer forbids that).
UniqueFd connection_to(const ReservedPort& port) {
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  for (;;)
    if (auto connected = connect_to(address_of_number({"127.0.0.1", port.number()}), deadline))
      return std::move(connected->fd);
}

// Who has no secret, or says nothing, or something else, keeps nobody out and takes nobody's place.
TEST_F(JobOfMachines, strangers_take_no_place_and_keep_nobody_out) {
  auto first = start(meeting(2, 2));
  wait_until_somebody_listens();
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connection_to(port));
  const std::string claim = "let me in\n";
  for (size_t i = 0; i < strangers.size(); i += 2) ::send(strangers[i].get(), claim.data(), claim.size(), MSG_NOSIGNAL);
  std::array<char, 256> answer{};
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  do ASSERT_TRUE(wait_for(POLLIN, strangers[0].get(), deadline));
  while (::recv(strangers[0].get(), answer.data(), answer.size(), 0) > 0);
  Meeting other = meeting(2, 2);
  other.timeout = milliseconds(300);
  {
    const Told wrong(std::string(64, 'b'));
    EXPECT_TRUE(testing::contains(start(other)->next(), "was refused at 127.0.0.1"));
  }
  const Told right(std::string(64, 'c'));
  auto second = start(meeting(2, 2));
  EXPECT_EQ(second->next(), "epoch 0 machine 1 of 2 first 1 of 2 restarts 0");
}

}  // namespace
}  // namespace lockstep
