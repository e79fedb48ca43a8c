// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/membership.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

constexpr milliseconds kSettles{100};  // machines that are lost together are noticed one after the other

std::string hosts_of(const std::vector<Member>& members) {
  std::vector<std::string> hosts;
  for (const Member& member : members) hosts.push_back(member.host());
  return join(hosts, ", ");
}

JobRecord ended(JobRecord record, std::string why) {
  record.ended = std::move(why);
  return record;
}

}  // namespace

// The epoch; on a second line, if the job has ended, why.
std::string to_text(const JobRecord& record) {
  return to_text(record.epoch) + (record.ended ? "\n" + *record.ended : "");
}

std::optional<JobRecord> parse_record(const std::string& text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  auto epoch = parse_epoch(std::string_view(text).substr(0, end));
  if (!epoch) return std::nullopt;
  return JobRecord{std::move(*epoch), end < text.size() ? std::optional(text.substr(end + 1)) : std::nullopt};
}

// "MEMBER EPOCH WISHES"
std::string to_text(const Presence& presence) {
  return concat(to_text(presence.member), " ", presence.epoch, " ", presence.wants_restart ? "restart," : "",
                presence.wants_to_leave ? "leave," : "", presence.has_finished ? "finished," : "");
}

std::optional<Presence> parse_presence(const std::string& text) {
  const auto parts = split(text, ' ');
  Presence presence;
  const auto member = parts.size() == 3 ? parse_member(parts[0]) : std::nullopt;
  if (!member || !parse_int(parts[1], presence.epoch)) return std::nullopt;
  presence.member = *member;
  const auto wishes = split(parts[2], ',');
  presence.wants_restart = std::ranges::find(wishes, "restart") != wishes.end();
  presence.wants_to_leave = std::ranges::find(wishes, "leave") != wishes.end();
  presence.has_finished = std::ranges::find(wishes, "finished") != wishes.end();
  return presence;
}

JobView::JobView(const MembershipStore::Entries& entries) {
  std::vector<std::pair<std::int64_t, Presence>> found;
  for (const auto& [key, entry] : entries) {
    if (key == kRecord) record = parse_record(record_text = entry.value);
    auto presence = key.starts_with(kPresence) ? parse_presence(entry.value) : std::nullopt;
    if (presence) found.emplace_back(entry.created, std::move(*presence));
  }
  std::ranges::sort(found, {}, [](const auto& each) { return each.first; });
  for (auto& [created, presence] : found) present.push_back(std::move(presence));
}

const Presence* JobView::find(const std::string& id) const {
  const auto found = std::ranges::find(present, id, [](const Presence& each) { return each.member.id; });
  return found == present.end() ? nullptr : &*found;
}

std::vector<Member> JobView::lost() const {
  std::vector<Member> lost;
  if (record)
    std::ranges::copy_if(record->epoch.members, std::back_inserter(lost),
                         [this](const Member& member) { return find(member.id) == nullptr; });
  return lost;
}

bool JobView::runs() const { return record && lost().size() < record->epoch.members.size(); }

const Presence* JobView::first() const {
  if (!runs()) return present.empty() ? nullptr : &present.front();
  for (const Member& member : record->epoch.members)
    if (const Presence* const here = find(member.id)) return here;
  return nullptr;
}

std::optional<JobRecord> Membership::next(const JobView& view, milliseconds now) {
  if (view.present.size() != came_) {
    came_ = view.present.size();
    last_came_ = now;
  }
  const Presence* const first = view.first();
  const bool is_mine = first != nullptr && first->member.id == me_;
  std::optional<JobRecord> wanted;
  if (is_mine) wanted = view.runs() ? go_on(view) : begin(view, now);
  if (!wanted || !view.runs()) {
    cause_since_.reset();
    return wanted;
  }
  if (!cause_since_) cause_since_ = now;
  return now - *cause_since_ >= kSettles ? wanted : std::nullopt;
}

// Also where the store has the record of a job with this name that nobody is left of.
std::optional<JobRecord> Membership::begin(const JobView& view, milliseconds now) const {
  const int here = to_int(view.present.size());
  if (here < meeting_.least || (here < meeting_.most && now - last_came_ < meeting_.last_call)) return std::nullopt;
  JobRecord record;
  for (const Presence& each : view.present)
    if (std::ssize(record.epoch.members) < meeting_.most) record.epoch.members.push_back(each.member);
  return record;
}

std::optional<JobRecord> Membership::go_on(const JobView& view) const {
  const JobRecord& now = *view.record;
  if (now.ended) return std::nullopt;
  JobRecord next{.epoch = {.number = now.epoch.number + 1, .restarts = now.epoch.restarts}};
  bool restarts = false;
  bool all_have_finished = true;
  for (const Member& member : now.epoch.members) {
    const Presence* const here = view.find(member.id);
    const bool counts = here != nullptr && here->epoch == now.epoch.number;  // else its wishes are about another epoch
    restarts = restarts || (counts && here->wants_restart);
    all_have_finished = all_have_finished && counts && here->has_finished;
    if (here != nullptr && !here->wants_to_leave) next.epoch.members.push_back(member);
  }
  if (all_have_finished) return ended(now, "");
  const std::size_t stay = next.epoch.members.size();
  const bool has_changed = restarts || stay < now.epoch.members.size();
  if (has_changed && !meeting_.replaces) {
    const auto lost = view.lost();
    return ended(now, lost.empty() ? "a machine was asked to stop" : concat("lost machine ", hosts_of(lost)));
  }
  for (const Presence& each : view.present)
    if (meeting_.replaces && !now.epoch.has(each.member.id) && !each.wants_to_leave &&
        std::ssize(next.epoch.members) < meeting_.most)
      next.epoch.members.push_back(each.member);
  if (!has_changed && next.epoch.members.size() == stay) return std::nullopt;
  if (restarts) ++next.epoch.restarts;
  if (const int left = to_int(next.epoch.members.size()); left < meeting_.least || stay == 0)
    return ended(now, concat("only ", left, " machines are left, and --nnodes asks for at least ", meeting_.least));
  return next;
}

}  // namespace lockstep
