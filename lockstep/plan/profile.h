// SPDX-License-Identifier: Apache-2.0
// plan/profile.h: what was measured of one model on one machine: all that a forecast rests on.
//
// Flow:    plan/measure.h -> a Profile, as JSON in a file -> plan/schedules.h
// Threads: a value
// Ranks:   no communication; no torch
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::plan {

constexpr int kProfileFormat = 5;  // raised when a reader of the old one would misunderstand the new one

// Medians of a few steps, for one number of samples per device.
struct StepTimes {
  std::int64_t samples = 0;
  double forward = 0;  // seconds, as the next two
  double backward = 0;
  double update = 0;
};

// Steps with growing numbers of samples, by so many ranks at the same time, of so many threads each; or by device threads of
// one process, which share its heap.
struct Curve {
  int at_once = 1;  // ranks, or device threads
  int threads = 1;
  bool in_one_process = false;
  std::vector<StepTimes> points;
};

// A module's part of a step, in the order of forward(). Operators without a parameter stand under their own names.
struct ModuleTimes {
  std::string name;
  double backward = 0;     // seconds
  std::int64_t bytes = 0;  // of its parameters
};

// Of the pieces that a pipeline's stages are made of.
struct PieceTimes {
  std::string name;
  double seconds = 0;       // forward and backward
  std::int64_t bytes = 0;   // of its parameters
  double output_bytes = 0;  // for each sample
};

// One way to compress gradients (lockstep/communication_hook.h), for each byte of a gradient in float32.
struct CompressionTimes {
  std::string kind;   // of --compression
  double sent = 1;    // bytes that a rank sends
  double encode = 0;  // seconds of one thread, while backward runs
  double decode = 0;  // seconds of one thread, afterwards; with two bits and top-k for each rank's part
};

struct SizedTime {
  double bytes = 0;
  double seconds = 0;
};

struct SizedMemory {
  std::int64_t samples = 0;
  double bytes = 0;
};

struct Profile {
  // What it is of. Another model, or another machine, has another text.
  std::string model;    // "lenet: 129,068 parameters (9f3a...), sgd"
  std::string machine;  // "2 cores, AMD EPYC"
  std::string data;     // "cifar-10:/data, flip"
  int cores = 1;

  std::int64_t parameter_bytes = 0;
  std::int64_t state_bytes = 0;  // of the optimizer
  std::vector<double> tensors;   // bytes of each parameter, in the model's order
  double output_bytes = 0;       // for each sample, of the whole model
  std::int64_t dataset = 0;      // samples of an epoch; 0: not known

  std::vector<Curve> curves;
  std::vector<double> spread;  // times of single steps over their median, sorted
  std::vector<ModuleTimes> modules;
  std::vector<PieceTimes> pieces;  // none: the model can't be cut
  std::vector<CompressionTimes> compression;
  double loss = 0;  // seconds for each sample: the loss alone, forward and backward

  double common_bytes = 0;                  // that all ranks of a machine share: libraries above all
  double idle_bytes = 0;                    // a rank's own, without a model
  std::vector<SizedMemory> memory_of_rank;  // its own, while it trains with so many samples
  std::vector<double>
      copy_speed;      // [n-1] bytes per second that n ranks together read and write: measured for 1, 2, 4, ... and all
  double barrier = 0;  // seconds, of as many ranks as there are cores
  double crowded_barrier = 0;       // of twice as many
  double handover = 0;              // seconds, to give as many device threads as cores work and hear that it is done
  double crowded_handover = 0;      // twice as many
  std::vector<SizedTime> loopback;  // all_reduce of two machines over loopback: what messages cost without a link
  std::vector<SizedTime> loopback_work;  // the same: seconds of cores that it takes on both machines together
  double message = 0;                    // seconds of a small message between two machines over loopback
  double message_work = 0;               // the same: seconds of cores, at both ends
  double message_work_of_many = 0;       // of each of many that are under way at the same time
  double connection_bytes = 0;           // of memory, at each end of a connection between machines
  double store_link_bytes = 0;           // the same of a link between a worker and a server
};

// Seconds of a forward and backward with that many samples; straight lines between what was measured.
StepTimes times_for(const Curve& curve, double samples);

// Of a rank that is alone: with one thread, or with as many as were measured.
const Curve& curve_alone(const Profile& profile, bool with_all_threads = false);

// Throws UsageError: it was not measured.
const CompressionTimes& compression_for(const Profile& profile, const std::string& kind);

double median_update(const Curve& curve);  // seconds, over its points

// Work of cores that all_reduce of several machines is made of.
struct WorkOfMessages {
  double start = 0;    // seconds of each machine, once: threads that slept are woken
  double message = 0;  // at both ends, without its bytes
  double byte = 0;     // at both ends
};
WorkOfMessages work_of_messages(const Profile& profile);  // zeros: it was not measured

// A straight line through the points: fixed cost, and cost per byte.
struct Line {
  double fixed = 0;
  double per_byte = 0;
  double to_size(double bytes) const { return fixed + per_byte * bytes; }
};
Line line_through(const std::vector<SizedTime>& points);

// As JSON, and back. `source` is what errors name. Throws DataError: damaged, no profile, or one of another version.
std::string text_of(const Profile& profile);
Profile profile_in(const std::string& text, const std::string& source);

// Throws DataError: a number that can't be, which would make a strategy look as if it took no time.
void require_possible_numbers(const Profile& profile, const std::string& source);

// Both check the numbers. Throw DataError, or SystemError: the file can't be written, or read.
void save_profile(const std::filesystem::path& file, const Profile& profile);
Profile load_profile(const std::filesystem::path& file);

}  // namespace lockstep::plan
