// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/own_progress.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/trace.h"
#include "lockstep/launch/fault.h"

namespace lockstep::own_progress {
namespace {

std::atomic<bool> in_step{false};

RankRecord& nowhere() {
  static RankRecord record;
  return record;
}

bool has_ended(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

// The first process of a rank that uses lockstep has its record: not a helper that it starts, which has the same variables.
bool claim(RankRecord& record) {
  std::int32_t owner = 0;
  while (!record.pid.compare_exchange_strong(owner, ::getpid()))
    if (owner != ::getpid() && !has_ended(owner)) return false;
  return true;
}

// Null: no launcher of ours, or one that this process can't see (another user, another container).
RankRecord* record_of_launcher() try {
  const char* const address = std::getenv("LOCKSTEP_PAGE");  // "/proc/PID/fd/N SEAT"
  if (address == nullptr) return nullptr;
  const std::vector<std::string> parts = split(address, ' ');
  int seat = -1;
  if (parts.size() != 2 || !parse_int(parts[1], seat)) return nullptr;
  JobPage page = JobPage::open(parts[0]);
  if (seat < 0 || seat >= page.header().ranks || !claim(page.record(seat))) return nullptr;
  ::prctl(PR_SET_PTRACER, page.header().launcher);  // where Yama lets only parents look: the launcher's debugger, too
  RankRecord& record = page.record(seat);
  page.leave_mapped();
  return &record;
} catch (const std::exception&) {
  return nullptr;
}

// A forked child is not this rank. It looks for a record of its own: a launcher's child has one.
void look_again_in_children() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, &look_again);
  static_cast<void>(registered);
}

void publish(Phase phase) {
  RankRecord& mine = record();
  const std::int64_t now = trace::now();
  const std::int64_t since = mine.phase_since.exchange(now, std::memory_order_relaxed);
  const Phase before = mine.phase.exchange(phase, std::memory_order_relaxed);
  mine.ns_in_phase[static_cast<std::size_t>(before)].fetch_add(now - since, std::memory_order_relaxed);
  moved();
}

void begin_faults(Phase phase) {
  if (!fault::strikes_in_a_part_of(phase)) fault::begin(phase);
}
void end_faults(Phase phase) {
  if (!fault::strikes_in_a_part_of(phase)) fault::end(phase);
}

}  // namespace

void look_again() { present.store(nullptr); }

RankRecord& find_record() {
  look_again_in_children();
  RankRecord* const found = record_of_launcher();
  RankRecord& record = found != nullptr ? *found : nowhere();
  std::int64_t not_begun = 0;
  record.phase_since.compare_exchange_strong(not_begun, trace::now());
  present.store(&record, std::memory_order_release);
  return record;
}

void begin_step(std::int64_t step) {
  record().step.store(step, std::memory_order_relaxed);
  in_step.store(true, std::memory_order_relaxed);
}

void begin_next_step() {
  if (!in_step.load(std::memory_order_relaxed)) begin_step(record().step.load(std::memory_order_relaxed) + 1);
}

void finish_step(std::int64_t samples, double loss) {
  if (!in_step.exchange(false, std::memory_order_relaxed)) return;
  record().samples.fetch_add(samples, std::memory_order_relaxed);
  record().loss.store(loss, std::memory_order_relaxed);
}

void enter(Phase phase) {
  end_faults(record().phase.load(std::memory_order_relaxed));
  publish(phase);
  begin_faults(phase);
}

During::During(Phase phase) : phase_(phase), before_(record().phase.load(std::memory_order_relaxed)) {
  if (before_ == phase_) return;
  publish(phase_);
  begin_faults(phase_);
}

During::~During() {
  if (before_ == phase_) return;
  end_faults(phase_);
  publish(before_);
}

void waits_for(std::int32_t pid) {
  RankRecord& mine = record();
  const std::int64_t now = trace::now();
  mine.looked_at.store(now, std::memory_order_relaxed);
  mine.waits_for.store(pid, std::memory_order_relaxed);
  if (mine.wait_since.load(std::memory_order_relaxed) == 0) mine.wait_since.store(now, std::memory_order_release);
}

void waits_no_more() {
  RankRecord& mine = record();
  const std::int64_t since = mine.wait_since.exchange(0, std::memory_order_relaxed);
  if (since != 0) mine.ns_waited.fetch_add(trace::now() - since, std::memory_order_relaxed);
}

}  // namespace lockstep::own_progress
