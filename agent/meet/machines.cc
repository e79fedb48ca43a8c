// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/machines.h"

#include <sys/prctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <set>
#include <utility>

#include "agent/meet/membership.h"
#include "lockstep/base/retry.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = Packet::Kind;

constexpr milliseconds kLookEvery{100};
constexpr milliseconds kPatience{60'000};  // for a store that does not answer, while something has to be decided
constexpr milliseconds kLauncherAnswersWithin{10'000};  // it may wait for a process that takes long to end or to begin
constexpr milliseconds kLastWordsWithin{2000};          // or lost_after, if that is longer
constexpr size_t kLongestName = 176;

RendezvousError too_few(const Meeting& meeting, size_t came) {
  return RendezvousError({.what = concat(came, " of at least ", meeting.least, " machines came to ",
                                         meeting.places.front().text(), " within ", human_seconds(meeting.timeout)),
                          .likely = "a machine that did not start, or has another --rdzv-endpoint",
                          .next = "look at the other machines; --rdzv-conf join_timeout=SECONDS waits longer"});
}

RendezvousError begun_without(const Meeting& meeting, const Epoch& epoch) {
  return RendezvousError(
      {.what = concat("the job at ", meeting.places.front().text(), " runs without this machine"),
       .here = concat(epoch.members.size(), " machines, --nnodes ", meeting.least, ":", meeting.most),
       .likely =
           "it has all the machines that --nnodes allows, or no --max-restarts, without which none may join later",
       .next = "start this one before the others begin, or raise MAX of --nnodes MIN:MAX"});
}

// The process that keeps in touch. It says to its launcher: epoch RECORD, say WORDS, ended WHY, failed KIND WHAT HERE PEER LIKELY NEXT; and
// hears of it: alive, restart, leave, finished, end WHY.
class Contact {
 public:
  Contact(const Meeting& meeting, UniqueFd launcher)
      : meeting_(meeting), launcher_(std::make_unique<Channel>(std::move(launcher))) {
    me_.member = {.id = new_member_id(), .ranks = meeting.ranks};
  }

  void run(const Machines::OpenStore& open) try {
    const Deadline deadline = Deadline::after(meeting_.timeout);
    store_ = open(meeting_, deadline);
    ::prctl(PR_SET_PDEATHSIG, 0);  // a launcher that is killed is taken off the list before this process ends
    join();
    for (bool is_last = false;; is_last = !hear_launcher()) {  // once more after the launcher's last words
      const auto asked = Clock::now();
      if (has_to_write_) write_presence();
      const auto entries = store_->read();
      if (!entries || Clock::now() - asked > meeting_.silence / 3) quiet_until_ = Clock::now() + meeting_.silence;
      if (entries)
        follow(JobView(*entries), deadline);
      else if (is_guest() && store_->is_lost() && !deadline.passed())  // of a job that has just ended
        store_ = open(meeting_, deadline);
      else
        miss_store();
      if (is_last) return say_goodbye();
    }
  } catch (const Error& error) {
    const ErrorText& text = error.text();
    tell({"failed", error.kind(), text.what, text.here, text.peer, text.likely, text.next});
  } catch (const std::exception& error) {
    tell({"failed", "SystemError", concat("can't keep in touch with the other machines: ", error.what()), "", "", "",
          ""});
  }

 private:
  void tell(std::vector<std::string> words) {
    launcher_.put({.kind = Kind::kSet, .texts = std::move(words)});
    launcher_.write();
  }

  // Rank 0's stores take turns at two ports, which stay free while this lives.
  void join() {
    me_.member.address = store_->own_address();
    for (int& port : me_.member.master_ports) port = ports_.emplace_back(me_.member.address).number();
    membership_.emplace(meeting_, me_.member.id);
    tell({"me", me_.member.id});
  }

  // Waits a little. False: the launcher has gone, or has said nothing for so long that it hangs.
  bool hear_launcher() {
    pollfd polled = to_poll(launcher_.fd(), launcher_.events());
    poll_for({&polled, 1}, kLookEvery);
    const auto now = Clock::now();
    awake_ += std::min(std::chrono::duration_cast<milliseconds>(now - std::exchange(turn_, now)), 2 * kLookEvery);
    if (!launcher_.write() || !launcher_.read()) return false;
    while (const auto packet = launcher_.next()) {
      heard_ = awake_;
      hear(*packet);
      if (!launcher_.read()) return false;
    }
    has_to_write_ = has_to_write_ || awake_ - written_ >= meeting_.silence / 10;
    return !heard_ || awake_ - *heard_ <= std::max(meeting_.silence, kLauncherAnswersWithin);
  }

  // A wish about an epoch that is over by now has come true already.
  void hear(const Packet& packet) {
    const std::string& what = packet.texts.at(0);
    if (what == "end") end_ = packet.texts.at(1);
    if (what == "leave") me_.wants_to_leave = has_to_write_ = true;
    if (packet.number != me_.epoch) return;
    if (what == "restart") me_.wants_restart = has_to_write_ = true;
    if (what == "finished") me_.has_finished = has_to_write_ = true;
  }

  void write_presence() {
    has_to_write_ = !store_->write_own(kPresence + me_.member.id, to_text(me_));
    if (!has_to_write_) written_ = awake_;
  }

  bool is_guest() const { return me_.epoch < 0; }

  void follow(const JobView& view, const Deadline& deadline) {
    answered_ = awake_;
    const auto& record = view.record;
    const bool is_in = view.runs() && record->epoch.has(me_.member.id);
    if (is_guest() && !is_in && deadline.passed())
      throw view.runs() ? begun_without(meeting_, record->epoch) : too_few(meeting_, view.present.size());
    const bool has_begun_without = view.runs() && !is_in && !record->ended;
    if (is_guest() && has_begun_without && !meeting_.replaces) throw begun_without(meeting_, record->epoch);
    if (is_in && record->epoch.number > me_.epoch) begin(record->epoch);
    if (!is_guest() && record && !record->epoch.has(me_.member.id))
      return leave(concat("the other machines go on without this one, in generation ", record->epoch.number));
    if (is_in && record->ended) return leave(*record->ended);
    say_what_changed(view);
    auto next = Clock::now() < quiet_until_ ? std::nullopt : membership_->next(view, awake_);
    if (end_ && is_in) (next = record)->ended = *end_;
    if (next) store_->replace(kRecord, view.record_text, to_text(*next));
  }

  void begin(const Epoch& epoch) {
    me_.epoch = epoch.number;
    me_.wants_restart = me_.has_finished = false;
    has_to_write_ = true;
    tell({"epoch", to_text(JobRecord{epoch})});
  }

  void leave(const std::string& why) {
    if (has_left_) return;
    tell({"ended", why});
    has_left_ = me_.wants_to_leave = has_to_write_ = true;  // nobody takes this machine in again while its ranks end
  }

  void say_what_changed(const JobView& view) {
    if (!view.runs() || view.record->ended) return;
    for (const Member& member : view.lost())
      if (told_.insert(member.id).second)
        tell({"say", concat("machine ", member.host(), " (", member.address,
                            ") is lost: its launcher has ended, or was silent for ", human_seconds(meeting_.silence))});
    for (const Presence& each : view.present)
      if (view.first()->member.id == me_.member.id && each.epoch < 0 && !view.record->epoch.has(each.member.id) &&
          told_.insert(each.member.id).second)
        tell({"say", concat("machine ", each.member.host(), " asks to join")});
  }

  // A step never waits for the store: what runs goes on, until something has to be decided.
  void miss_store() {
    if (store_->is_lost())
      return leave(concat("it has lost ", store_->name(), "; with --rdzv-backend etcd the job would go on"));
    const bool waits = me_.wants_restart || me_.wants_to_leave || end_ || is_guest();
    if (!waits) answered_ = awake_;
    if (awake_ - answered_ > kPatience)
      leave(concat(store_->name(), " has not answered for ", human_seconds(kPatience)));
  }

  // A process that serves the store stays until the others have read the end, and have gone.
  void say_goodbye() {
    if ((!has_left_ && !end_) || !store_->serves()) return;
    const auto is_alone = [this] {
      const auto entries = store_->read();
      return !entries || JobView(*entries).present.size() < 2;
    };
    retry(Deadline::after(std::max(kLastWordsWithin, meeting_.silence)), kLookEvery, is_alone);
  }

  Meeting meeting_;
  PacketStream launcher_;
  Presence me_{};
  std::unique_ptr<MembershipStore> store_{};
  std::vector<ReservedPort> ports_{};
  std::optional<Membership> membership_{};
  std::set<std::string> told_{};
  std::optional<std::string> end_{};  // the launcher ends the job, and why
  bool has_left_ = false;
  bool has_to_write_ = true;
  Clock::time_point
      quiet_until_{};  // the store has been away, and other launchers may not have been able to say that they live
  // Time in which this process ran itself: one that was stopped accuses nobody.
  Clock::time_point turn_ = Clock::now();
  milliseconds awake_{};
  std::optional<milliseconds> heard_{};  // the launcher, since it has begun
  milliseconds answered_{};              // by the store
  milliseconds written_{};
};

}  // namespace

Machines::Machines(const Meeting& meeting, const OpenStore& open) : beat_(meeting.silence / 10), stream_(nullptr) {
  if (meeting.job.size() > kLongestName || meeting.job.find_first_of("\n/") != std::string::npos)
    throw UsageError({.what = concat("--rdzv-id is '", meeting.job, "'"),
                      .next = concat("choose a name of one line, at most ", kLongestName, " characters, without /")});
  auto [ours, theirs] = connected_pair();
  stream_ = PacketStream(std::make_unique<Channel>(std::move(ours)));
  const auto contact = [&, &theirs = theirs] {
    Contact(meeting, std::move(theirs)).run(open);
    return 0;
  };
  ProcessOptions options{.body = contact, .keeps = std::set{theirs.get()}};
  ::sigfillset(&options.signal_mask);  // signals are the launcher's; the end of the socket ends it
  process_.emplace(options);
  theirs.reset();
  try {
    wait_for_the_beginning();
  } catch (...) {
    say_goodbye();
    throw;
  }
}

void Machines::wait_for_the_beginning() {
  while (epoch_.members.empty() && !end_) {  // the process has the deadline
    pollfd polled = to_poll(stream_.fd(), stream_.events());
    poll_for({&polled, 1}, longest_wait());
    work();
  }
  if (end_) throw RendezvousError({.what = *end_, .next = "look at the other machines' output"});
  has_news_ = false;
}

Machines::~Machines() { say_goodbye(); }

void Machines::say_goodbye() {
  ::shutdown(stream_.fd(), SHUT_WR);
  if (process_) wait_for(POLLIN, process_->pidfd(), Deadline::after(2 * std::max(kLastWordsWithin, 10 * beat_)));
}

std::vector<Event> Machines::events() const {
  return {{stream_.fd(), stream_.events(), [] {}}};
}

void Machines::tell(const std::string& what, const std::string& more) {
  stream_.put({.kind = Kind::kSet, .number = epoch_.members.empty() ? -1 : epoch_.number, .texts = {what, more}});
  stream_.write();
}

void Machines::finish() {
  if (!std::exchange(has_finished_, true)) tell("finished");
}

void Machines::work() {
  const auto now = Clock::now();
  if (now >= next_beat_) {
    next_beat_ = now + beat_;
    tell("alive");
  }
  stream_.write();  // also to a process that has ended: what it has said last is still to be read
  bool is_there = stream_.read();
  while (const auto packet = stream_.next()) {
    hear(*packet);
    is_there = is_there && stream_.read();
  }
  if (!is_there && !over_ && !end_)
    end_ = "the process that meets the other machines was killed, or this launcher hung for too long";
}

void Machines::hear(const Packet& packet) {
  const auto& texts = packet.texts;
  const std::string& what = texts.at(0);
  if (what == "failed") {
    const ErrorText text{texts.at(2), texts.at(3), texts.at(4), texts.at(5), texts.at(6)};
    if (texts.at(1) == "UsageError") throw UsageError(text);
    throw Error(texts.at(1), text);
  }
  if (what == "me") id_ = texts.at(1);
  if (what == "say") words_.push_back(texts.at(1));
  if (what == "ended") {
    over_ = texts.at(1).empty();
    if (!over_ && !end_) end_ = texts.at(1);
  }
  auto record = what == "epoch" ? parse_record(texts.at(1)) : std::nullopt;
  if (!record) return;
  epoch_ = std::move(record->epoch);
  has_news_ = true;
  has_finished_ = false;
}

std::optional<Epoch> Machines::take_news() {
  return std::exchange(has_news_, false) ? std::optional(epoch_) : std::nullopt;
}

}  // namespace lockstep
