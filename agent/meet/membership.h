// SPDX-License-Identifier: Apache-2.0
// agent/meet/membership.h: on which machines a job runs: what the first of its launchers decides, from what all of them write
// into a store. docs/design/membership.md
//
// Flow:    machines.cc -> here -> the next record
// Owns:    no connection and no clock
// Threads: one
// Ranks:   none; one per launcher
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "agent/meet/epoch.h"
#include "agent/meet/membership_store.h"
#include "lockstep/deadline.h"

namespace lockstep {

inline constexpr const char* kRecord = "record";     // its key
inline constexpr const char* kPresence = "member/";  // and those of the launchers, before their ids

struct JobRecord {
  Epoch epoch{};
  std::optional<std::string> ended{};  // why the job has; "": all have succeeded
};

// As JSON. Nothing: another text, which a launcher of another version may have written.
std::string to_text(const JobRecord& record);
std::optional<JobRecord> parse_record(const std::string& text);

// A launcher writes this about itself.
struct Presence {
  Member member{};
  int epoch = -1;  // that it has begun; its wishes are about this one
  bool wants_restart = false;
  bool wants_to_leave = false;
  bool has_finished = false;
};
std::string to_text(const Presence& presence);
std::optional<Presence> parse_presence(const std::string& text);

// The store at one moment.
struct JobView {
  std::string record_text{};
  std::optional<JobRecord> record{};
  std::vector<Presence> present{};  // in the order in which they came

  explicit JobView(const MembershipStore::Entries& entries);
  const Presence* find(const std::string& id) const;
  std::vector<Member> lost() const;  // members of the record that are not there any more
  bool runs() const;                 // a member of the record is there
  const Presence* first() const;     // who decides; null: nobody is there
};

class Membership {
 public:
  Membership(const Meeting& meeting, std::string me) : meeting_(meeting), me_(std::move(me)) {}

  // Call it with each view. Returns the record to write next, if it is this launcher's turn and there is cause.
  std::optional<JobRecord> next(const JobView& view, milliseconds now);

 private:
  std::optional<JobRecord> begin(const JobView& view, milliseconds now) const;
  std::optional<JobRecord> go_on(const JobView& view) const;

  Meeting meeting_;
  std::string me_;
  size_t came_ = 0;           // launchers that were there
  milliseconds last_came_{};  // when their number changed
  std::optional<milliseconds> cause_since_{};
};

}  // namespace lockstep
