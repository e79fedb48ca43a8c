// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/happens_before.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

struct StreamClock {
  c10::Stream stream;
  Clock clock;
};

std::vector<StreamClock>& streams() {
  static auto* const kStreams = new std::vector<StreamClock>;
  return *kStreams;
}

size_t number_of(const c10::Stream& stream) {
  static auto* const kNumbers = new std::map<std::pair<int, c10::StreamId>, size_t>;
  const auto [at, added] = kNumbers->emplace(std::pair(stream.device_index(), stream.id()), streams().size());
  if (added) streams().push_back({stream, {}});
  return at->second;
}

uint64_t at(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

Clock& host() {
  static auto* const kProcess = new Clock;
  thread_local Clock thread;
  return settings().threads_apart ? thread : *kProcess;
}

Clock& clock_at(size_t stream) {
  Clock& clock = streams()[stream].clock;
  if (clock.size() <= stream) clock.resize(stream + 1);
  return clock;
}

bool overlap(const Use& a, const Use& b) { return a.begin < b.end && b.begin < a.end; }
bool covers(const Use& a, const Use& b) { return a.begin <= b.begin && b.end <= a.end; }

std::string describe(const Use& earlier, const Use& use) {
  std::ostringstream text;
  const auto verb = [](const Use& of) { return of.writes ? " writes" : " reads"; };
  text << "lockstep simulator: a wait is missing: " << use.work << " on " << name_of(use.moment) << verb(use)
       << " bytes that " << earlier.work << " on " << name_of(earlier.moment) << verb(earlier)
       << "\n  here:   nothing orders the two: they may run at the same time or in the other order"
       << "\n  likely: no event is recorded after the first and waited for before the second"
       << "\n  next:   c10::Event::record() on " << name_of(earlier.moment) << " after the first, block() on "
       << name_of(use.moment) << " before the second";
  return text.str();
}

struct Races {
  uint64_t count = 0;
  std::string last, late;
};

bool throws_at_races() { return settings().throws_at_races && !waits_are_left_out(); }

Races& races() {
  static auto* const kRaces = new Races;
  return *kRaces;
}

void count_race(const std::string& race) {
  if (race.empty()) return;
  ++races().count;
  races().last = race;
  if (!waits_are_left_out()) std::fprintf(stderr, "%s\n", race.c_str());
}

}  // namespace

std::string name_of(const c10::Stream& stream) {
  return "cuda:" + std::to_string(stream.device_index()) + " stream " + std::to_string(stream.id());
}

std::string name_of(Moment moment) { return name_of(streams()[moment.stream].stream); }

Moment now_on(const c10::Stream& stream) {
  const size_t number = number_of(stream);
  return {number, clock_at(number)[number]};
}

Moment launch(const c10::Stream& stream) {
  const size_t number = number_of(stream);
  Clock& clock = clock_at(number);
  join(clock, host());
  return {number, ++clock[number]};
}

Clock clock_of(const c10::Stream& stream) {
  Clock& clock = clock_at(number_of(stream));
  join(clock, host());
  return clock;
}

void wait(const c10::Stream& stream, const Clock& clock) { join(clock_at(number_of(stream)), clock); }

void host_waits(const Clock& clock) { join(host(), clock); }

std::vector<c10::Stream> streams_of(int device) {
  std::vector<c10::Stream> found;
  for (const StreamClock& of : streams())
    if (of.stream.device_index() == device) found.push_back(of.stream);
  return found;
}

bool ordered(Moment first, const c10::Stream& then) { return at(clock_of(then), first.stream) >= first.at; }

bool host_waited_for(Moment moment) { return at(host(), moment.stream) >= moment.at; }

std::string note(Uses& uses, Use use, const c10::Stream& stream) {
  std::string race;
  if (!settings().checks_races) return race;
  for (const Use& earlier : uses)
    if (race.empty() && (use.writes || earlier.writes) && overlap(earlier, use) && !ordered(earlier.moment, stream))
      race = describe(earlier, use);
  // A later use that is ordered after this one is ordered after all that this one covers.
  std::erase_if(uses, [&](const Use& earlier) {
    return covers(use, earlier) && (use.writes || !earlier.writes) && ordered(earlier.moment, stream);
  });
  uses.push_back(std::move(use));
  return race;
}

void report_race(const std::string& race) {
  count_race(race);
  TORCH_CHECK(race.empty() || !throws_at_races(), race);
}

void report_race_later(const std::string& race) {
  count_race(race);
  if (!race.empty() && throws_at_races()) races().late = race;
}

void throw_late_races() { TORCH_CHECK(races().late.empty(), std::exchange(races().late, {})); }

}  // namespace simulated_cuda

extern "C" {

uint64_t simulated_cuda_races() {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  return simulated_cuda::races().count;
}

size_t simulated_cuda_last_race(char* text, size_t size) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  const std::string& last = simulated_cuda::races().last;
  if (size > 0) {
    const size_t length = std::min(last.size(), size - 1);
    std::memcpy(text, last.data(), length);
    text[length] = '\0';
  }
  return last.size();
}

void simulated_cuda_clear_races() {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  simulated_cuda::races() = {};
}
}
