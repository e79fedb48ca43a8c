// SPDX-License-Identifier: Apache-2.0
// launch/own_progress.h: publishes what this rank is doing, in its record of the page that the launcher has made, or in a page
// of its own; and records spans while `lockstep trace JOB` asks for it there.
//
// Flow:    training step, loader, checkpoints, collectives -> here -> job_page.h; fault.h, which may end the rank there
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

#include "lockstep/launch/job_page.h"

namespace lockstep::own_progress {

inline std::atomic<RankRecord*> present{nullptr};  // find_record() alone changes it
RankRecord& find_record();                         // never fails
void look_again();                                 // LOCKSTEP_PAGE has changed

inline RankRecord& record() {
  RankRecord* const found = present.load(std::memory_order_acquire);
  return found != nullptr ? *found : find_record();
}

void enter(Phase phase);  // leaves the one before

// A phase while this lives, in the midst of the one before.
class During {
 public:
  explicit During(Phase phase);
  ~During();
  During(const During&) = delete;
  During& operator=(const During&) = delete;

 private:
  Phase phase_;
  Phase before_;
};

// A training loop says which step it begins. Others only make steps, which are counted from 0.
void begin_step(std::int64_t step);
void begin_next_step();                               // unless one has begun and is not finished
void finish_step(std::int64_t samples, double loss);  // of all ranks; once more does nothing

// A call has begun.
inline void moved() {
  std::atomic<std::uint64_t>& moves = record().moves;
  moves.store(moves.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// This rank waits for the one that is process `pid`, or kAnyPeer. Called again and again while it does.
void waits_for(std::int32_t pid);
void waits_no_more();
void forget_wait();  // one that an error has ended: what came afterwards was no waiting

void has_loader(int workers);

// What these ranks are, where no launcher has said so.
struct Meeting {
  int rank = 0;
  int world_size = 1;
  std::string job;  // the same on all ranks, unlike that of any other job
};
void meets(const Meeting& meeting);

// ---- A server of a kvstore

void serves(int clients);
void has_applied_gradient(std::int64_t delay);

// A request that has come, until it is answered.
class Serving {
 public:
  Serving();
  ~Serving();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;

 private:
  std::int64_t since_;
};

// ---- A trace that begins while the rank runs

// Called with true where such a trace begins, and with false where it ends: what records more than spans of lockstep.
inline std::atomic<void (*)(bool)> record_more{nullptr};

// A call of several machines: this rank may wait for one that the launcher here can't see.
class CallingOthers {
 public:
  CallingOthers() { record().calls_others.fetch_add(1, std::memory_order_relaxed); }
  ~CallingOthers() { record().calls_others.fetch_sub(1, std::memory_order_relaxed); }
  CallingOthers(const CallingOthers&) = delete;
  CallingOthers& operator=(const CallingOthers&) = delete;
};

}  // namespace lockstep::own_progress
