// SPDX-License-Identifier: Apache-2.0
// observe/rank_progress.h: publishes what this rank is doing, in its record of the page that the launcher has made, or in a page
// of its own; and records a trace while `lockstep trace JOB` asks for it there.
//
// Flow:    PhaseScope, loader, collectives, servers -> here -> job_page.h
// Owns:    a mapping of the page, from the first call until the process ends. In a process that a rank has started or
//          forked, and where no page can be made: a record that nobody reads
// Threads: any. Where several work at the same time the last phase entered counts
// Ranks:   one record per process: ranks that are threads share it
//
// A change of phase costs a look at the clock and some stores, about 0.1 us; moved() one store.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "lockstep/observe/job_page.h"

namespace lockstep::observe {

inline std::atomic<RankRecord*> present{nullptr};  // find_record() alone changes it
RankRecord& find_record();                         // never fails

inline RankRecord& record() {
  RankRecord* const found = present.load(std::memory_order_acquire);
  return found != nullptr ? *found : find_record();
}

int64_t enter(Phase phase);  // leaves the one before; returns the time, trace::now()

// A training loop says which step it begins. Others only make steps, which are counted from 0.
void begin_step(int64_t step);
void begin_next_step();                          // unless one has begun and is not finished
void finish_step(int64_t samples, double loss);  // of all ranks; once more does nothing

// A call has begun.
inline void moved() {
  std::atomic<uint64_t>& moves = record().moves;
  moves.store(moves.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// This rank waits for another one: on the page by its pid, and in a trace by its rank in the job.
class WaitScope {
 public:
  // pid: kAnyPeer for no rank in particular; kOwnThread: the page does not show the wait. rank: -1: nor does the trace.
  WaitScope(int32_t pid, int rank);
  ~WaitScope();
  WaitScope& operator=(WaitScope&&) = delete;

  void goes_on() const;  // called every few ms: the rank is not stopped

 private:
  int32_t pid_;
  int rank_;
  int64_t began_;  // for the trace; 0: it does not show the wait
};

// A call of several machines: this rank may wait for one that the launcher here can't see.
class CallingOthers {
 public:
  CallingOthers() { record().calls_others.fetch_add(1, std::memory_order_relaxed); }
  ~CallingOthers() { record().calls_others.fetch_sub(1, std::memory_order_relaxed); }
  CallingOthers& operator=(CallingOthers&&) = delete;
};

void has_loader(int workers);

// Names these ranks, where no launcher has done so. The first meeting of several ranks counts.
struct Meeting {
  int rank = 0;
  int world_size = 1;
  std::string job;  // the same on all ranks, unlike that of any other job
  int node_rank = 0;
};
void meets(const Meeting& meeting);

// ---- A server of a kvstore

void serves(int clients);
void has_applied_gradient(int64_t delay);

// A request that has come, until it is answered.
class Serving {
 public:
  Serving();
  ~Serving();
  Serving& operator=(Serving&&) = delete;

 private:
  int64_t since_;
};

}  // namespace lockstep::observe
