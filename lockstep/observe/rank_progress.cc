// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/rank_progress.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"

namespace lockstep::observe {
namespace {

std::atomic<bool> in_step{false};

RankRecord& nowhere() {
  static RankRecord record;
  return record;
}

bool has_ended(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

// The first process of a rank that uses lockstep has its record: not a helper that it starts, which has the same variables.
bool claim(RankRecord& record) {
  int32_t owner = 0;
  while (!record.pid.compare_exchange_strong(owner, ::getpid()))
    if (owner != ::getpid() && !has_ended(owner)) return false;
  return true;
}

// The record that LOCKSTEP_PAGE names (job_page.h). Null: another process has it. Throws Error: this process can't see the page
// (another container).
RankRecord* record_of_launcher(const char* address) {
  const std::vector<std::string> parts = split(address, ' ');
  int seat = -1;
  if (parts.size() != 2 || !parse_int(parts[1], seat)) return nullptr;
  JobPage page = JobPage::open(parts[0]);
  if (seat < 0 || seat >= page.header().ranks || !claim(page.record(seat))) return nullptr;
  ::prctl(PR_SET_PTRACER, page.header().launcher);  // where Yama lets only parents look: the launcher's debugger, too
  RankRecord& record = page.record(seat);
  page.leave_mapped();
  return &record;
}

std::unique_ptr<JobPage> make_own_page() {
  auto page = std::make_unique<JobPage>(JobPageHeader{.ranks = 1});
  page->rename(concat(::getpid()), 1, 0);
  page->record(0).pid = ::getpid();
  return page;
}

std::atomic<const JobPage*> own_page{nullptr};  // stays until the process ends

// Returns null in a forked child of the process that has made it.
RankRecord* record_of_own() {
  const JobPage* page = own_page.load();
  if (page == nullptr) {
    std::unique_ptr<JobPage> made = make_own_page();
    if (own_page.compare_exchange_strong(page, made.get())) page = made.release();
  }
  return page->header().launcher == ::getpid() ? &page->record(0) : nullptr;
}

RankRecord* record_of_rank() try {
  const char* const address = std::getenv("LOCKSTEP_PAGE");
  if (address == nullptr || *address == '\0') return record_of_own();
  try {
    return record_of_launcher(address);
  } catch (const Error&) {
    return record_of_own();
  }
} catch (const std::exception&) {
  return nullptr;
}

// A forked child is not this rank. It looks for a record of its own: a launcher's child has one.
std::atomic<bool> follows_order{false};  // a thread does, so that it alone uses what is next
int64_t refused_until = 0;

void look_again_in_children() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
    present.store(nullptr);
    trace::forget_memory();
    follows_order.store(false);
    refused_until = 0;
  });
  static_cast<void>(registered);
}

// Returns null if it has waited for so many others before.
WaitForPeer* sum_for(RankRecord& mine, int32_t pid) {
  if (pid == kAnyPeer) return nullptr;
  for (WaitForPeer& each : mine.waited_for) {
    int32_t owner = each.pid.load(std::memory_order_relaxed);
    if (owner == pid) return &each;
    if (owner == 0 && (each.pid.compare_exchange_strong(owner, pid) || owner == pid)) return &each;
  }
  return nullptr;
}

// ---- A trace that begins while the rank runs

void end_overdue_trace(int64_t now);

void begin_trace(RankRecord& mine) try {
  trace::Process process{.rank = mine.job_rank, .pid = ::getpid(), .job = mine.trace.until};
  host_name().copy(process.host.data(), process.host.size() - 1);
  mine.trace.fd.store(trace::open_memory(process, end_overdue_trace));
  mine.trace.began.store(trace::now());
} catch (const Error&) {
  mine.trace.refused.store(trace::now());
}

// Begins or ends a trace as the page says. One thread at a time: of ranks that are threads any may come.
void follow_trace_order(RankRecord& mine) {
  if (follows_order.exchange(true, std::memory_order_acquire)) return;
  int64_t until = mine.trace.until;
  const int64_t now = trace::now();
  const bool began = mine.trace.began > std::max<int64_t>(mine.trace.ended, mine.trace.refused);
  if (began && now >= until) {
    trace::leave_memory();
    mine.trace.ended.store(trace::now());
  } else if (!began && now < until && refused_until != until) {
    begin_trace(mine);
  }
  if (!began && mine.trace.refused > mine.trace.began) refused_until = until;
  if (now >= until) mine.trace.until.compare_exchange_strong(until, 0);  // unless somebody has asked again
  follows_order.store(false, std::memory_order_release);
}

void look_for_trace_order(RankRecord& mine) {
  if (mine.trace.until.load(std::memory_order_relaxed) != 0) [[unlikely]]
    follow_trace_order(mine);
}

// A trace ends at the begin of a step. Where none comes within this time, because the steps are long or the program takes no
// further one, it ends at the next thing that would be recorded.
constexpr int64_t kOverdue = int64_t{5} * 1'000'000'000;

void end_overdue_trace(int64_t now) {
  RankRecord& mine = record();
  const int64_t until = mine.trace.until.load(std::memory_order_relaxed);
  if (until != 0 && now - kOverdue >= until) follow_trace_order(mine);
}

}  // namespace

RankRecord& find_record() {
  look_again_in_children();
  RankRecord* const found = record_of_rank();
  RankRecord& record = found != nullptr ? *found : nowhere();
  int64_t not_begun = 0;
  record.phase_since.compare_exchange_strong(not_begun, trace::now());
  present.store(&record, std::memory_order_release);
  return record;
}

void begin_step(int64_t step) {
  RankRecord& mine = record();
  look_for_trace_order(mine);
  mine.step.store(step, std::memory_order_relaxed);
  in_step.store(true, std::memory_order_relaxed);
}

void begin_next_step() {
  if (!in_step.load(std::memory_order_relaxed)) begin_step(record().step.load(std::memory_order_relaxed) + 1);
}

void finish_step(int64_t samples, double loss) {
  if (!in_step.exchange(false, std::memory_order_relaxed)) return;
  record().samples.fetch_add(samples, std::memory_order_relaxed);
  record().loss.store(loss, std::memory_order_relaxed);
}

int64_t enter(Phase phase) {
  RankRecord& mine = record();
  const int64_t now = trace::now();
  const int64_t since = mine.phase_since.exchange(now, std::memory_order_relaxed);
  moved();  // before the phase: whoever sees the new phase sees that this rank has moved
  const Phase before = mine.phase.exchange(phase, std::memory_order_release);
  mine.ns_in_phase[static_cast<size_t>(before)].fetch_add(now - since, std::memory_order_relaxed);
  if (mine.step.load(std::memory_order_relaxed) < 0) look_for_trace_order(mine);  // it may never take a step
  if (trace::records()) [[unlikely]]
    end_overdue_trace(now);
  return now;
}

WaitScope::WaitScope(int32_t pid, int rank) : pid_(pid), rank_(rank), began_(rank < 0 ? 0 : trace::now_if_recording()) {
  goes_on();
}

// Another thread of this rank may have noted the end of a wait of its own meanwhile.
void WaitScope::goes_on() const {
  if (pid_ == kOwnThread) return;
  RankRecord& mine = record();
  const int64_t now = trace::now();
  mine.looked_at.store(now, std::memory_order_relaxed);
  mine.waits_for.store(pid_, std::memory_order_relaxed);
  if (mine.wait_since.load(std::memory_order_relaxed) == 0) mine.wait_since.store(now, std::memory_order_release);
}

WaitScope::~WaitScope() {
  trace::write(began_, [this] { return trace::Event{.name = "wait for rank", .number = rank_}; });
  if (pid_ == kOwnThread) return;
  RankRecord& mine = record();
  const int64_t since = mine.wait_since.exchange(0, std::memory_order_relaxed);
  if (since == 0) return;
  const int64_t waited = trace::now() - since;
  const Phase phase = mine.phase.load(std::memory_order_relaxed);
  mine.ns_waited[static_cast<size_t>(phase)].fetch_add(waited, std::memory_order_relaxed);
  if (WaitForPeer* const sum = sum_for(mine, pid_)) sum->ns.fetch_add(waited, std::memory_order_relaxed);
}

void meets(const Meeting& meeting) {
  record();
  const JobPage* const page = own_page.load();
  static std::mutex mutex;  // of ranks that are threads
  const std::lock_guard lock(mutex);
  if (page == nullptr || page->header().launcher != ::getpid() || page->header().world_size > 1) return;
  page->rename(meeting.job.empty() ? concat(::getpid()) : meeting.job, meeting.world_size, meeting.node_rank);
  page->record(0).job_rank.store(meeting.rank, std::memory_order_relaxed);
}

void has_loader(int workers) { record().loader_workers.store(workers, std::memory_order_relaxed); }

void serves(int clients) { record().server.clients.store(clients, std::memory_order_relaxed); }

void has_applied_gradient(int64_t delay) {
  ServerRecord& server = record().server;
  server.gradients.fetch_add(1, std::memory_order_relaxed);
  server.delays.fetch_add(delay, std::memory_order_relaxed);
  int64_t most = server.most_delay.load(std::memory_order_relaxed);
  while (most < delay && !server.most_delay.compare_exchange_weak(most, delay, std::memory_order_relaxed)) continue;
}

Serving::Serving() : since_(trace::now()) { record().server.in_hand.fetch_add(1, std::memory_order_relaxed); }

Serving::~Serving() {
  ServerRecord& server = record().server;
  server.in_hand.fetch_sub(1, std::memory_order_relaxed);
  server.requests.fetch_add(1, std::memory_order_relaxed);
  server.ns_in_hand.fetch_add(trace::now() - since_, std::memory_order_relaxed);
}

}  // namespace lockstep::observe
