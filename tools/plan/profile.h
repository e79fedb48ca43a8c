// SPDX-License-Identifier: Apache-2.0
// tools/plan/profile.h: what was measured of one model on one machine. Forecasts rest on nothing else.
//
// Flow:    tools/plan/measure.h -> a Profile, as JSON in a file -> tools/plan/schedules.h
// Threads: a value
// Ranks:   no communication; no torch
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::plan {

constexpr int kProfileFormat = 6;  // raised when a reader of the old one would misunderstand the new one

// Medians of a few steps, for one number of samples per device.
struct StepTimes {
  int64_t samples = 0;
  double forward = 0;  // seconds, as the next two
  double backward = 0;
  double update = 0;

  double computing() const { return forward + backward; }
};

// Steps with growing numbers of samples, by so many ranks at the same time, of so many threads each; or by device threads of
// one process, which share its heap.
struct Curve {
  int at_once = 1;  // ranks, or device threads
  int threads = 1;
  bool in_one_process = false;
  std::vector<StepTimes> points;
};

// A piece of the model that can't be cut further: a pipeline's stages are made of them.
struct PieceTimes {
  std::string name;
  double seconds = 0;       // forward and backward
  double bytes = 0;         // of its parameters
  double output_bytes = 0;  // for each sample
};

struct SizedTime {
  double bytes = 0;
  double seconds = 0;
};

struct SizedMemory {
  int64_t samples = 0;
  double bytes = 0;
};

struct Profile {
  // Names what was measured. Another model, or another machine, has another text.
  std::string model;    // "lenet: 129,068 parameters (9f3a...), sgd"
  std::string machine;  // "2 cores, AMD EPYC"
  std::string data;     // "cifar-10:/data, flip"
  int cores = 1;

  double parameter_bytes = 0;
  double state_bytes = 0;       // of the optimizer
  std::vector<double> tensors;  // bytes of each parameter, in the model's order
  int64_t dataset = 0;          // samples of an epoch; 0: not known

  std::vector<Curve> curves;   // first that of one rank alone; the others are of as many devices, or threads, as cores
  std::vector<double> spread;  // times of single steps over their median, sorted
  std::vector<PieceTimes> pieces;  // none: the model can't be cut

  double common_bytes = 0;                  // that all ranks of a machine share: libraries above all
  double idle_bytes = 0;                    // a rank's own, without a model
  std::vector<SizedMemory> memory_of_rank;  // its own, while it trains with so many samples
  double copy_speed = 0;                    // bytes per second that one rank reads and writes
  double copy_speed_of_all = 0;             // that of a rank on each core; 0: not measured
  std::vector<SizedTime> loopback;       // all_reduce of two machines over loopback: what messages cost without a link
  std::vector<SizedTime> loopback_work;  // the same: seconds of cores that it takes on both machines together
  double connection_bytes = 0;           // of memory, at each end of a connection between machines
};

// Seconds of a forward and backward with that many samples; straight lines between the measured points.
StepTimes times_for(const Curve& curve, double samples);

// A straight line through the points: fixed cost, and cost per byte.
struct Line {
  double fixed = 0;
  double per_byte = 0;
  double at(double bytes) const { return fixed + bytes * per_byte; }
};
Line line_through(const std::vector<SizedTime>& points);

// Seconds of cores that a message between machines takes, at both ends together. Zeros: it was not measured.
Line work_of_messages(const Profile& profile);

// Convert to JSON, and back. Errors name `source`. Throws DataError: damaged, no profile, or one of another version.
std::string text_of(const Profile& profile);
Profile profile_in(const std::string& text, const std::string& source);

// Throws DataError: a number that can't be, which would make a strategy look as if it took no time.
void require_possible_numbers(const Profile& profile, const std::string& source);

// Check the numbers, too. Throw DataError, or SystemError: the file can't be written, or read.
void save_profile(const std::filesystem::path& file, const Profile& profile);
Profile load_profile(const std::filesystem::path& file);

}  // namespace lockstep::plan
