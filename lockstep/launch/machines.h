// SPDX-License-Identifier: Apache-2.0
// launch/machines.h: a launcher's connections to those of the other machines, as long as the job runs.
//
// Flow:    node_meeting.h -> here, with membership.h -> launcher.h, which starts the ranks of each epoch
// Owns:    sockets, and a short-lived process when an arbiter is asked
// Threads: one: the launcher's, which calls work() after each poll()
// Ranks:   none; one per machine
//
// Every pair of launchers has one connection, which the later one in the order of the epoch opens, over channels that
// ask for the job's secret. At the port where the others reach this launcher, new machines are let in too. While
// machines are missing, the first one in order knocks once a second at those that were lost: a launcher that was
// started again there comes in.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/arbiter.h"
#include "lockstep/launch/events.h"
#include "lockstep/launch/line_channel.h"
#include "lockstep/launch/membership.h"
#include "lockstep/launch/process.h"
#include "lockstep/launch/roster.h"

namespace lockstep {

class Machines {
 public:
  Machines(const Membership::Options& options, Roster roster, std::shared_ptr<Arbiter> arbiter = nullptr);
  ~Machines();  // waits a moment until the others have heard its last words
  Machines& operator=(Machines&&) = delete;

  // For poll(), with the longest wait before the next work().
  std::vector<Event> events();
  static milliseconds longest_wait() { return milliseconds(100); }
  // Reads, writes and counts time. Does not block.
  void work();

  const Epoch& epoch() const { return membership_.epoch(); }
  const Member& me() const { return roster_.me; }
  int node_rank() const { return epoch().index_of(me().id); }
  const std::string& job() const { return roster_.job; }

  // A newer epoch than the last one taken, of which this machine is a member.
  std::optional<Epoch> take_news();
  // Why this machine can't go on: left out, on the smaller side of a cut, or another launcher has ended the job.
  std::optional<std::string> end() const;

  void want_restart() { membership_.want_restart(); }
  void want_to_leave() { membership_.want_to_leave(); }
  void finish() { membership_.finish(); }
  bool all_done() const { return membership_.all_done(); }
  void end_job(const std::string& why);  // on all machines
  // Lines about machines that are lost, come and go, since the last call.
  std::vector<std::string> take_words() { return std::exchange(words_, {}); }

  std::vector<int> descriptors() const;  // that a forked child must close

 private:
  using Clock = std::chrono::steady_clock;
  enum class Kind { kStranger, kGuest, kMember, kKnock };
  struct Link {
    Kind kind;
    std::string peer;  // a member's or guest's id
    LineChannel lines;
    Clock::time_point since = Clock::now();
  };

  void accept_all();
  void read_links();
  bool hear(Link& link, const std::string& line);  // false: it is to be closed
  bool hear_stranger(Link& link, const std::string& line);
  void drop_links();
  void deliver();
  void open_links();
  void open(Kind kind, const std::string& peer, const std::string& address, int port, const std::string& first_line);
  std::unique_ptr<Channel> channel_of(UniqueFd fd) const;
  void knock();
  void ask_arbiter(const std::string& request);
  void hear_arbiter();
  void follow_epoch();
  void say_what_is_lost();
  void say_when_all_are_connected();
  Link* link_of(const std::string& peer);

  Roster roster_;  // with the epoch whose links these are
  Membership membership_;
  milliseconds beat_;
  int most_;
  std::shared_ptr<Arbiter> arbiter_;
  std::list<Link> links_{};
  int taken_;           // number of the last news
  int connected_ = -1;  // number of the last epoch all of whose members were connected
  Clock::time_point last_ = Clock::now();
  Clock::time_point next_try_{};
  Clock::time_point next_knock_{};
  std::set<std::string> was_linked_{};
  std::map<std::string, int> refusals_{};  // of members that were never linked
  std::map<std::string, Member> gone_{};   // who was a member once
  std::set<std::string> told_lost_{};
  std::vector<std::string> words_{};
  std::optional<std::string> ended_{};
  std::optional<Process> asking_{};
  UniqueFd answer_{};
  std::string answered_{};
  Clock::time_point asked_at_{};
};

}  // namespace lockstep
