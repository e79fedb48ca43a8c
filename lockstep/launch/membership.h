// SPDX-License-Identifier: Apache-2.0
// launch/membership.h: how the launchers of a job agree on who is left, and on who is new. docs/design/membership.md
// has the protocol, membership.pml its model.
//
// Flow:    what others have said, what connections have closed, time -> here -> what to tell others, the next epoch
// Owns:    no socket and no clock: machines.h has them, tests simulate them
// Threads: one
// Ranks:   none; one per launcher
//
// Every member tells every other one every `beat` that it is alive. One whose connection is closed, or who has been
// silent for `silence`, is lost to the one that notices it, for good: it may come back as another member. The first
// member in the order of the epoch that is not lost proposes the next epoch; should it be lost, the second does, and so
// on. An epoch needs the votes of more than half of the members of the one before; of an even number of members half is
// enough if the arbiter votes with it. So no two sides of a network that is cut both go on.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/deadline.h"
#include "lockstep/launch/agreement.h"
#include "lockstep/launch/epoch.h"

namespace lockstep {

inline constexpr const char* kArbiter = "arbiter";  // as a voter, in the place of a member's id

class Membership {
 public:
  using milliseconds = std::chrono::milliseconds;

  struct Options {
    int least = 1;  // machines
    int most = 1;
    milliseconds beat{300};
    milliseconds silence{3000};
    milliseconds contact{10'000};   // until a new member has said its first word
    milliseconds patience{60'000};  // for the arbiter's word, or an agreement at all
    bool has_arbiter = false;
  };
  struct Message {
    std::string to;
    std::string text;
  };

  Membership(const Options& options, std::string me, Epoch epoch);

  // ---- what happens

  void hear(const std::string& from, const std::string& text);
  void close(const std::string& peer, const std::string& why);  // its connection
  // Time in which this launcher was awake. Who was stopped itself accuses nobody of silence.
  void pass(milliseconds elapsed);

  // ---- what is wished from here; told to who proposes, until there is an epoch that has it

  void want_restart();       // a rank here has failed: a new epoch, which counts one restart more
  void want_to_leave();      // this machine
  void admit(Member guest);  // who has asked here
  void dismiss(const std::string& guest);
  void finish();  // the ranks here have succeeded

  // ---- what comes of it

  std::vector<Message> take_messages();
  const Epoch& epoch() const { return epoch_; }
  bool is_member() const { return epoch_.has(me_); }
  // Why this machine can't go on. Nothing: it can, as far as is known.
  const std::optional<std::string>& end() const { return end_; }
  // Every member has finished, and has been told so by this one; or this one has, and those that are left are too few to
  // go on: it needs nobody.
  bool all_done() const;

  // Members that are lost to this one, with the reason, and members that are not, without this one.
  std::vector<std::pair<Member, std::string>> lost() const;
  std::vector<Member> others() const;
  bool is_lost(const std::string& peer) const;

 private:
  struct Peer {
    milliseconds heard{};     // when
    bool has_spoken = false;  // ever
    bool done = false;
    std::string lost{};              // why; "": it is not
    std::set<std::string> misses{};  // members that are lost to it
  };

  void send(const std::string& to, std::string text) { messages_.push_back({to, std::move(text)}); }
  void hear_beat(const std::string& from, const std::string& text);
  void hear_wish(const std::string& from, const std::string& text);
  void beat();
  void tell_wishes(const std::string& leader);
  void notice_silence();
  void lose(Peer& peer, const std::string& why);
  void check_votes();
  void lead();
  bool has_cause() const;
  bool is_any_in_doubt() const;
  void propose();
  void ask_voters(const std::string& request);
  void hear_answer(const std::string& voter, const std::string& answer);
  void decide(const std::string& value);
  void adopt(const Epoch& epoch);
  Epoch wish() const;
  std::set<std::string> unreachable() const;
  std::set<std::string> present() const;
  std::string leader() const;
  int votes_needed() const { return static_cast<int>(epoch_.members.size()) / 2 + 1; }
  bool needs_arbiter() const;

  Options options_;
  std::string me_;
  Epoch epoch_;
  std::map<std::string, Peer> peers_{};  // the other members
  milliseconds now_{};
  milliseconds next_beat_{};
  bool done_ = false;
  bool told_done_ = false;  // since the last of the others has finished
  bool is_over_ = false;    // for this one, whatever became of the others
  std::optional<std::string> end_{};
  std::vector<Message> messages_{};

  // Wishes of this launcher.
  bool my_restart_ = false;
  bool my_leave_ = false;
  std::map<std::string, Member> my_guests_{};

  // State of the decision about the next epoch.
  Acceptor acceptor_{};
  std::optional<Proposal> proposal_{};
  Ballot newest_ballot_ = 0;
  milliseconds propose_at_{};
  std::optional<milliseconds> cause_since_{};
  bool restart_ = false;
  std::set<std::string> leavers_{};
  std::map<std::string, Member> guests_{};
};

}  // namespace lockstep
