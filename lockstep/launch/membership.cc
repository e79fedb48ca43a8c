// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/membership.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr milliseconds kSettles{100};        // machines that are lost together are noticed one after the other
constexpr milliseconds kAttemptLasts{1500};  // until a proposer tries again
constexpr Ballot kMostMembers = 4096;        // a ballot is a count and, below it, the proposer's place

}  // namespace

Membership::Membership(const Options& options, std::string me, Epoch epoch) : options_(options), me_(std::move(me)) {
  adopt(epoch);
}

// ---- what is heard

void Membership::hear(const std::string& from, const std::string& text) {
  const std::string what = text.substr(0, text.find(' '));
  if (what == "decided") {
    const auto epoch = parse_epoch(text.substr(what.size() + 1));
    if (epoch && epoch->number > epoch_.number) adopt(*epoch);
    return;
  }
  if (from == kArbiter) return hear_answer(from, text);
  const auto found = peers_.find(from);
  if (found == peers_.end()) {  // it has missed an epoch, the one without it
    if (what == "alive" || what == "prepare") send(from, "decided " + to_text(epoch_));
    return;
  }
  if (!found->second.lost.empty()) return;
  found->second.heard = now_;
  found->second.has_spoken = true;
  if (what == "alive") return hear_beat(from, text);
  if (what == "want") return hear_wish(from, text);
  if (what != "prepare" && what != "accept") return hear_answer(from, text);
  int decision = 0;
  std::istringstream(text.substr(what.size())) >> decision;
  if (decision <= epoch_.number) return send(from, "decided " + to_text(epoch_));
  if (decision == epoch_.number + 1) send(from, acceptor_.answer(text));
}

// "alive EPOCH DONE LOST,LOST"
void Membership::hear_beat(const std::string& from, const std::string& text) {
  const auto parts = split(text, ' ');
  int epoch = 0;
  if (parts.size() != 4 || !parse_int(parts[1], epoch)) return;
  if (epoch < epoch_.number) send(from, "decided " + to_text(epoch_));
  if (epoch != epoch_.number) return;
  Peer& peer = peers_.at(from);
  if (parts[2] == "1" && !peer.done) {
    peer.done = true;
    told_done_ = false;  // it may not have been connected when this launcher said so
    next_beat_ = now_;
  }
  for (const std::string& id : split(parts[3], ','))
    if (epoch_.has(id)) peer.misses.insert(id);
}

// "want EPOCH restart", "want EPOCH leave", "want EPOCH join MEMBER"
void Membership::hear_wish(const std::string& from, const std::string& text) {
  const auto parts = split(text, ' ');
  int epoch = 0;
  if (parts.size() < 3 || !parse_int(parts[1], epoch) || epoch != epoch_.number) return;
  if (parts[2] == "restart") restart_ = true;
  if (parts[2] == "leave") leavers_.insert(from);
  if (parts[2] != "join" || parts.size() != 4) return;
  if (const auto guest = parse_member(parts[3])) guests_.insert_or_assign(guest->id, *guest);
}

void Membership::close(const std::string& peer, const std::string& why) {
  const auto found = peers_.find(peer);
  if (found != peers_.end()) lose(found->second, why);
}

void Membership::lose(Peer& peer, const std::string& why) {
  if (!peer.lost.empty()) return;
  peer.lost = why;
  next_beat_ = now_;
}

// ---- time

void Membership::pass(milliseconds elapsed) {
  now_ += elapsed;
  if (end_ || !is_member()) return;
  notice_silence();
  check_votes();
  if (end_) return;
  lead();
  if (now_ >= next_beat_) beat();
}

void Membership::notice_silence() {
  for (auto& [id, peer] : peers_) {
    const milliseconds most = peer.has_spoken ? options_.silence : std::max(options_.contact, options_.silence);
    if (peer.lost.empty() && now_ - peer.heard > most)
      lose(peer, peer.has_spoken ? concat("silent for ", human_seconds(now_ - peer.heard))
                                 : concat("not reached within ", human_seconds(most)));
  }
}

void Membership::beat() {
  next_beat_ = now_ + options_.beat;
  std::vector<std::string> misses;
  for (const auto& [id, peer] : peers_)
    if (!peer.lost.empty()) misses.push_back(id);
  const std::string text = concat("alive ", epoch_.number, " ", done_ ? 1 : 0, " ", join(misses, ","));
  for (const Member& other : others()) send(other.id, text);
  told_done_ = done_;
  tell_wishes(leader());
}

void Membership::tell_wishes(const std::string& leader) {
  std::vector<std::string> wishes;
  if (my_restart_) wishes.emplace_back("restart");
  if (my_leave_) wishes.emplace_back("leave");
  for (const auto& [id, guest] : my_guests_) wishes.push_back("join " + to_text(guest));
  for (const std::string& wish : wishes) {
    const std::string text = concat("want ", epoch_.number, " ", wish);
    if (leader == me_)
      hear_wish(me_, text);
    else
      send(leader, text);
  }
}

void Membership::want_restart() {
  my_restart_ = true;
  next_beat_ = now_;
}

void Membership::want_to_leave() {
  my_leave_ = true;
  next_beat_ = now_;
}

void Membership::finish() {
  if (done_) return;
  done_ = true;
  next_beat_ = now_;
}

void Membership::admit(Member guest) {
  next_beat_ = now_;
  my_guests_.insert_or_assign(guest.id, std::move(guest));
}

void Membership::dismiss(const std::string& guest) {
  my_guests_.erase(guest);
  guests_.erase(guest);
}

// ---- who is there

std::set<std::string> Membership::present() const {
  std::set<std::string> ids{me_};
  for (const Member& other : others()) ids.insert(other.id);
  return ids;
}

std::string Membership::leader() const {
  const auto here = present();
  return std::ranges::find_if(epoch_.members, [&](const Member& one) { return here.contains(one.id); })->id;
}

// Half of an even number of members is here: one more vote decides.
bool Membership::needs_arbiter() const { return options_.has_arbiter && 2 * present().size() == epoch_.members.size(); }

// Without enough votes nothing can be agreed on any more: who is lost does not come back as the same member.
void Membership::check_votes() {
  const int here = static_cast<int>(present().size());
  const int all = static_cast<int>(epoch_.members.size());
  if (here + (needs_arbiter() ? 1 : 0) >= votes_needed()) return;
  if (done_) {  // the others' last words may be lost with their connections
    is_over_ = true;
    return;
  }
  end_ =
      concat("only ", here, " of ", all, " machines are left on this side, and ",
             2 * here == all ? "of exactly half an arbiter has to say which goes on" : "more than half have to go on");
}

bool Membership::all_done() const {
  return is_over_ || (told_done_ && std::ranges::all_of(peers_, [](const auto& peer) { return peer.second.done; }));
}

// Pairs that can't hear each other can't be in one epoch. Of those that this member hears, the fewest that have to go,
// and of two the later one.
std::set<std::string> Membership::unreachable() const {
  std::map<std::string, std::set<std::string>> cut;
  const auto here = present();
  for (const auto& [id, peer] : peers_)
    for (const std::string& other : peer.misses)
      if (here.contains(id) && here.contains(other)) {
        cut[id].insert(other);
        cut[other].insert(id);
      }
  std::set<std::string> out;
  for (;;) {
    std::string worst;
    for (const Member& member : epoch_.members)
      if (!cut[member.id].empty() && (worst.empty() || cut[member.id].size() >= cut[worst].size())) worst = member.id;
    if (worst.empty()) return out;
    for (const std::string& other : cut[worst]) cut[other].erase(worst);
    cut.erase(worst);
    out.insert(worst);
  }
}

// The next epoch, if it were for this member alone.
Epoch Membership::wish() const {
  const auto here = present();
  const auto out = unreachable();
  Epoch next{.number = epoch_.number + 1, .restarts = epoch_.restarts + (restart_ ? 1 : 0)};
  for (const Member& member : epoch_.members)
    if (here.contains(member.id) && !out.contains(member.id) && !leavers_.contains(member.id))
      next.members.push_back(member);
  for (const auto& [id, guest] : guests_)
    if (std::ssize(next.members) < options_.most && !epoch_.has(id)) next.members.push_back(guest);
  return next;
}

// ---- the next epoch

bool Membership::has_cause() const {
  for (const auto& [id, peer] : peers_)
    if (!peer.lost.empty() && !(done_ && peer.done)) return true;
  if (restart_ || my_restart_ || my_leave_ || !leavers_.empty() || !unreachable().empty()) return true;
  return !guests_.empty() && std::ssize(epoch_.members) < options_.most;
}

bool Membership::is_any_in_doubt() const {
  return std::ranges::any_of(peers_, [this](const auto& each) {
    const Peer& peer = each.second;
    return peer.lost.empty() && peer.has_spoken && now_ - peer.heard > options_.silence / 2;
  });
}

void Membership::lead() {
  if (!has_cause()) {
    cause_since_.reset();
    return;
  }
  if (!cause_since_) cause_since_ = now_;
  if (now_ - *cause_since_ > options_.patience) {
    end_ = concat("the machines could not agree within ", human_seconds(options_.patience), " on who is left",
                  needs_arbiter() ? ": the arbiter has not said that this side goes on" : "");
    return;
  }
  if (leader() != me_ || now_ < propose_at_ || now_ - *cause_since_ < kSettles || is_any_in_doubt()) return;
  if (const int left = static_cast<int>(wish().members.size()); left < options_.least) {
    end_ = concat("only ", left, " machines are left, and --nnodes asks for at least ", options_.least);
    return;
  }
  propose();
}

void Membership::propose() {
  const Ballot count = std::max(newest_ballot_, acceptor_.promised) / kMostMembers + 1;
  newest_ballot_ = count * kMostMembers + epoch_.index_of(me_);
  proposal_.emplace(epoch_.number + 1, newest_ballot_, votes_needed());
  propose_at_ = now_ + kAttemptLasts;
  ask_voters(proposal_->prepare());
}

void Membership::ask_voters(const std::string& request) {
  for (const Member& other : others()) send(other.id, request);
  if (needs_arbiter()) send(kArbiter, request);
  hear_answer(me_, acceptor_.answer(request));
}

void Membership::hear_answer(const std::string& voter, const std::string& answer) {
  if (!proposal_) return;
  proposal_->hear(voter, answer);
  if (proposal_->higher() > 0) {  // somebody else proposes too; the later in order gives way for longer
    newest_ballot_ = std::max(newest_ballot_, proposal_->higher());
    proposal_.reset();
    propose_at_ = now_ + kSettles * (1 + 2 * epoch_.index_of(me_));
  } else if (proposal_->is_decided()) {
    decide(proposal_->value());
  } else if (proposal_->has_promises() && !proposal_->is_asking()) {
    ask_voters(proposal_->accept(to_text(wish())));
  }
}

void Membership::decide(const std::string& value) {
  const auto next = parse_epoch(value);
  if (!next) return;
  std::set<std::string> hear_of_it = present();
  for (const Member& member : next->members)
    if (!is_lost(member.id)) hear_of_it.insert(member.id);
  hear_of_it.erase(me_);
  for (const std::string& id : hear_of_it) send(id, "decided " + value);
  adopt(*next);
}

void Membership::adopt(const Epoch& epoch) {
  std::map<std::string, Peer> before = std::move(peers_);
  peers_.clear();
  for (const Member& member : epoch.members) {
    if (member.id == me_) continue;
    Peer& peer = peers_[member.id];
    peer.heard = now_;
    const auto known = before.find(member.id);
    if (known == before.end()) continue;
    peer.heard = known->second.heard;
    peer.has_spoken = known->second.has_spoken;
    peer.lost = known->second.lost;
  }
  for (const Member& member : epoch.members) my_guests_.erase(member.id);
  epoch_ = epoch;
  next_beat_ = now_;
  done_ = told_done_ = is_over_ = my_restart_ = false;
  acceptor_ = {};
  proposal_.reset();
  newest_ballot_ = 0;
  propose_at_ = now_;
  cause_since_.reset();
  restart_ = false;
  leavers_.clear();
  guests_.clear();
}

// ---- what others ask

std::vector<Membership::Message> Membership::take_messages() { return std::exchange(messages_, {}); }

bool Membership::is_lost(const std::string& peer) const {
  const auto found = peers_.find(peer);
  return found != peers_.end() && !found->second.lost.empty();
}

std::vector<std::pair<Member, std::string>> Membership::lost() const {
  std::vector<std::pair<Member, std::string>> result;
  for (const auto& [id, peer] : peers_)
    if (!peer.lost.empty()) result.emplace_back(*epoch_.find(id), peer.lost);
  return result;
}

std::vector<Member> Membership::others() const {
  std::vector<Member> result;
  for (const auto& [id, peer] : peers_)
    if (peer.lost.empty()) result.push_back(*epoch_.find(id));
  return result;
}

}  // namespace lockstep
