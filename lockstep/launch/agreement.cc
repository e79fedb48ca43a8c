// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/agreement.h"

#include <algorithm>
#include <sstream>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// Takes what stands after the numbers, which may have blanks of its own.
std::string rest_of(std::istringstream& in) {
  std::string rest;
  std::getline(in >> std::ws, rest);
  return rest;
}

}  // namespace

std::string Acceptor::answer(const std::string& request) {
  std::istringstream in(request);
  std::string what;
  int decision = 0;
  Ballot ballot = 0;
  if (!(in >> what >> decision >> ballot) || (what != "prepare" && what != "accept")) return "";
  const std::string of = concat(" ", decision, " ", ballot);
  if (ballot < promised) return concat("higher", of, " ", promised);
  promised = ballot;
  if (what == "prepare") return concat("promised", of, " ", accepted, accepted > 0 ? " " + value : "");
  accepted = ballot;
  value = rest_of(in);
  return "accepted" + of;
}

std::string Acceptor::text() const { return concat(promised, " ", accepted, " ", value); }

Acceptor Acceptor::parse(const std::string& text) {
  std::istringstream in(text);
  Acceptor acceptor;
  if (!(in >> acceptor.promised >> acceptor.accepted)) return {};
  acceptor.value = rest_of(in);
  return acceptor;
}

std::string Proposal::prepare() const { return concat("prepare ", decision_, " ", ballot_); }

void Proposal::hear(const std::string& voter, const std::string& answer) {
  std::istringstream in(answer);
  std::string what;
  int decision = 0;
  Ballot ballot = 0;
  if (!(in >> what >> decision >> ballot) || decision != decision_ || ballot != ballot_) return;
  Ballot number = 0;
  if (what == "accepted" && is_asking()) acceptances_.insert(voter);
  if (what == "higher" && in >> number) higher_ = std::max(higher_, number);
  if (what != "promised" || is_asking() || !(in >> number)) return;
  promises_.insert(voter);
  if (number <= newest_accepted_) return;
  newest_accepted_ = number;
  newest_value_ = rest_of(in);
}

std::string Proposal::accept(const std::string& wish) {
  value_ = newest_accepted_ > 0 ? newest_value_ : wish;
  return concat("accept ", decision_, " ", ballot_, " ", value_);
}

}  // namespace lockstep
