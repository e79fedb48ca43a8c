// SPDX-License-Identifier: Apache-2.0
// launch/agreement.h: how launchers that may fail choose one value and never two: Paxos (Lamport, 1998).
//
// Flow:    membership.h -> here; arbiter.cc keeps an Acceptor where it outlives every launcher
// Threads: values
//
// A proposer asks the voters for promises under a ballot, then to accept a value under it. A value that more than half
// of the voters have accepted under one ballot is decided: every later proposer hears of it from one of them and
// proposes it.
//
//   request    prepare DECISION BALLOT                answer   promised DECISION BALLOT ACCEPTED [VALUE]
//              accept DECISION BALLOT VALUE                    accepted DECISION BALLOT
//                                                              higher DECISION BALLOT PROMISED
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace lockstep {

using Ballot = std::int64_t;  // from 1 on; no two proposers have the same

// A voter's memory of one decision.
struct Acceptor {
  Ballot promised = 0;  // it answers no lower one
  Ballot accepted = 0;  // 0: nothing yet
  std::string value{};

  std::string answer(const std::string& request);  // "": no request
  std::string text() const;
  static Acceptor parse(const std::string& text);  // of what text() gave; of anything else a new one
};

// One attempt of one proposer. It is for nothing once a voter has answered with a higher ballot.
class Proposal {
 public:
  Proposal(int decision, Ballot ballot, int quorum) : decision_(decision), ballot_(ballot), quorum_(quorum) {}

  std::string prepare() const;

  // Answers of voters; others, and those to older attempts, change nothing. has_promises() becomes true once.
  void hear(const std::string& voter, const std::string& answer);

  bool has_promises() const { return static_cast<int>(promises_.size()) >= quorum_; }
  bool is_asking() const { return !value_.empty(); }  // to accept

  // Proposes a value that may be decided already, or else `wish`. Returns the request.
  std::string accept(const std::string& wish);

  bool is_decided() const { return static_cast<int>(acceptances_.size()) >= quorum_; }
  const std::string& value() const { return value_; }
  Ballot higher() const { return higher_; }  // 0: nobody has answered with one

 private:
  int decision_;
  Ballot ballot_;
  int quorum_;
  std::set<std::string> promises_{};
  std::set<std::string> acceptances_{};
  Ballot newest_accepted_ = 0;
  std::string newest_value_{};
  std::string value_{};
  Ballot higher_ = 0;
};

}  // namespace lockstep
