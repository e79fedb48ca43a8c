// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/membership.h"

#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Member, id, address, master_ports, ranks)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Epoch, number, restarts, members)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Presence, member, epoch, wants_restart, wants_to_leave, has_finished)

namespace {

using nlohmann::json;

constexpr milliseconds kSettles{100};  // machines that are lost together are noticed one after the other

bool is_possible(const Member& member) {
  const auto is_port = [](int number) { return number >= 1 && number <= 65535; };
  return !member.id.empty() && !member.address.empty() && std::ranges::all_of(member.master_ports, is_port) &&
         member.ranks >= 1 && member.ranks <= kMostRanksOfMachine;
}

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

std::string to_text(const JobRecord& record) {
  json text = record.epoch;
  if (record.ended) text["ended"] = *record.ended;
  return text.dump();
}

std::optional<JobRecord> parse_record(const std::string& text) try {
  const json record = json::parse(text);
  JobRecord parsed{.epoch = record};
  if (const auto ended = record.find("ended"); ended != record.end()) parsed.ended = ended->get<std::string>();
  const Epoch& epoch = parsed.epoch;
  std::set<std::string> ids;
  const auto is_new = [&](const Member& member) { return is_possible(member) && ids.insert(member.id).second; };
  const bool possible = epoch.number >= 0 && epoch.restarts >= 0 && !epoch.members.empty();
  return possible && std::ranges::all_of(epoch.members, is_new) ? std::optional(parsed) : std::nullopt;
} catch (const json::exception&) {
  return std::nullopt;
}

std::string to_text(const Presence& presence) { return json(presence).dump(); }

std::optional<Presence> parse_presence(const std::string& text) try {
  const Presence presence = json::parse(text);
  return is_possible(presence.member) ? std::optional(presence) : std::nullopt;
} catch (const json::exception&) {
  return std::nullopt;
}

JobView::JobView(const MembershipStore::Entries& entries) {
  std::vector<std::pair<int64_t, Presence>> found;
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
  const size_t stay = next.epoch.members.size();
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
