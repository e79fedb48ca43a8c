// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measure.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/base/median.h"
#include "lockstep/base/memory_room.h"
#include "lockstep/base/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/deadline.h"
#include "lockstep/devices.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/observe/trace.h"
#include "lockstep/plan/measure_compression.h"
#include "lockstep/plan/measure_messages.h"
#include "lockstep/plan/measured_steps.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"

namespace lockstep::plan {
namespace {

// Seconds for steps: of ranks that have a core each; of twice as many; of one process with all cores, and with device threads.
constexpr double kForSteps = 7, kForCrowdedSteps = 4, kForThreads = 3, kForDeviceThreads = 3;
constexpr int kRounds = 300;  // of what takes microseconds
constexpr std::size_t kCopied = std::size_t{32} << 20;
constexpr double kMostMemory = 0.5;  // of what is free: more ranks than that holds are not tried

// ---- What a process has and is

double available_bytes() {
  const double free = proc_bytes("/proc/meminfo", "MemAvailable:");
  const std::optional<MemoryRoom> room = memory_room();
  return room ? std::min(free, static_cast<double>(room->left)) : free;
}

// A file for what a process has measured, gone with this.
class ResultFile {
 public:
  ResultFile() : path_((std::filesystem::temp_directory_path() / "lockstep-profile-XXXXXX").string()) {
    const int fd = ::mkstemp(path_.data());
    if (fd < 0) throw system_error("make", path_);
    ::close(fd);
  }
  ~ResultFile() { remove(); }
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;
  const std::string& path() const { return path_; }
  void remove() const {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }

 private:
  std::string path_;
};

// Runs `body` in so many ranks, each with its share of the cores; returns what rank 0 has put into the profile.
Profile in_ranks(int ranks, const Profile& so_far, const std::function<void(const World&, Profile&)>& body) {
  const ResultFile file;
  const auto rank = [&] {
    keep_freed_memory();
    at::set_num_threads(1);
    Profile profile = so_far;
    const World world = World::from_env();
    body(world, profile);
    if (world.rank() == 0) write_file(file.path(), text_of(profile));
    return 0;
  };
  const LaunchResult ended = launch({.ranks = ranks, .output = RankOutput::kFirst}, rank);
  if (!ended.failure && ended.exit_code > 128) {
    file.remove();
    ::raise(ended.exit_code - 128);  // the signal that launch() has taken
  }
  if (ended.exit_code != 0)
    throw SystemError({.what = concat("a process that measures has ended with code ", ended.exit_code),
                       .likely = ended.failure ? describe(*ended.failure, {}) : "it was asked to stop",
                       .next = "does `lockstep train` with the same options work?"});
  return profile_in(read_file(file.path()), "what was measured");
}

// ---- As many ranks as cores: steps alone and at once, memory, collectives

// What a rank has before there is a model, and what its model has.
void measure_ranks(const World& world, const Subject& subject, Profile& profile) {
  profile.idle_bytes = sum_of(world, own_bytes()) / world.size();
  Training training(subject);
  const Datasets data = subject.data();
  profile.dataset = data.train->size();
  const MeasuredSteps steps = measure_steps(world, training, data, subject.batch, kForSteps);
  profile.spread = steps.spread;
  profile.memory_of_rank = steps.memory;
  profile.common_bytes = largest_of(world, shared_bytes());  // once training has touched what it needs of the libraries
  profile.curves = {steps.alone};
  if (world.size() > 1) profile.curves.push_back(steps.at_once);
  for (const auto& [name, parameter] : named_parameters(training.strategy().model())) {
    profile.tensors.push_back(static_cast<double>(parameter.nbytes()));
    profile.parameter_bytes += static_cast<std::int64_t>(parameter.nbytes());
    for (const auto& [key, state] : training.strategy().optimizer().state_of(parameter))
      if (state.defined()) profile.state_bytes += static_cast<std::int64_t>(state.nbytes());
  }
}

// Bytes per second that the first n ranks together read and write.
double copy_speed(const World& world, int ranks) {
  const torch::Tensor from = torch::ones({kCopied}, torch::kUInt8), to = torch::ones({kCopied}, torch::kUInt8);
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    world.barrier();
    const Stopwatch watch;
    if (world.rank() < ranks) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kCopied);
    seconds.push_back(largest_of(world, world.rank() < ranks ? watch.seconds() : 0));
  }
  return 2.0 * kCopied * ranks / median(seconds);
}

double barrier_seconds(const World& world) {
  for (int i = 0; i < 10; ++i) world.barrier();
  const Stopwatch watch;
  for (int i = 0; i < kRounds; ++i) world.barrier();
  return watch.seconds() / kRounds;
}

void measure_collectives(const World& world, Profile& profile) {
  double speed = 0;
  for (int ranks = 1; ranks <= world.size(); ++ranks) {
    const bool is_measured = ranks == 1 || ranks == world.size() || (ranks & (ranks - 1)) == 0;
    if (is_measured) speed = copy_speed(world, ranks);
    profile.copy_speed.push_back(speed);
  }
  profile.barrier = barrier_seconds(world);
}

// More ranks than cores. The machine may be slower now than before, so the steps count in proportion to those of a rank that
// is alone, now and before.
void measure_crowd(const World& world, const Subject& subject, Profile& profile) {
  Training training(subject);
  MeasuredSteps steps = measure_steps(world, training, subject.data(), subject.batch, kForCrowdedSteps);
  if (world.rank() != 0) return;
  undo_drift(steps.at_once, steps.alone, profile.curves.front());
  profile.curves.push_back(steps.at_once);
}

// ---- One process with all cores: threads, modules, pieces

std::string end_of(const std::string& name) {
  constexpr std::size_t kShown = trace::Name().size() - 1;
  return name.substr(name.size() - std::min(name.size(), kShown));
}

// Operators by the module whose parameters they take, from a trace of a few steps.
void measure_modules(const Datasets& data, Training& training, Profile& profile) {
  constexpr int kTraced = 3;
  const ResultFile ring;
  const Batch batch = batch_of(data, profile.curves.front().points.back().samples);
  const auto parameters = named_parameters(training.strategy().model());
  name_modules(parameters);
  trace::open(ring.path(), {});
  trace::record(true);
  for (int i = 0; i < kTraced; ++i) training.step(batch);
  trace::record(false);
  const trace::Recording recording = trace::parse(trace::content(), ring.path());
  trace::close();
  const auto module_named = [&](const std::string& name) -> ModuleTimes& {
    const auto found = std::ranges::find(profile.modules, name, &ModuleTimes::name);
    return found != profile.modules.end() ? *found : profile.modules.emplace_back(ModuleTimes{.name = name});
  };
  for (const trace::Event& span : recording.events) {
    const double seconds = static_cast<double>(span.end - span.begin) / 1e9 / kTraced;
    if (span.kind == trace::Kind::kBackward) module_named(span.name.text()).backward += seconds;
  }
  for (const auto& [path, parameter] : parameters)
    module_named(end_of(path.substr(0, std::min(path.size(), path.rfind('.'))))).bytes +=
        static_cast<std::int64_t>(parameter.nbytes());
}

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const torch::Tensor& tensor : tensors)
    if (tensor.defined()) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

// A model that can't be cut has no pieces.
void measure_pieces_of(const Subject& subject, const Datasets& data, Profile& profile) {
  const std::int64_t measured = profile.curves.front().points.back().samples;
  const std::int64_t samples = std::clamp<std::int64_t>(subject.batch / 4, 1, measured);
  const ModulePtr model = subject.task.make_model();
  const Layout layout = subject.strategy.layout.value_or(preferred_layout(*model, torch::kCPU));
  set_layout(*model, layout);
  const Batch batch = batch_of(data, samples);
  const torch::Tensor input = in_layout(batch.data, layout);
  std::vector<Piece> pieces;
  try {
    pieces = pieces_of(subject.task, *model);
  } catch (const UsageError&) {
    return;
  }
  Tensors tensors = {input};
  const std::vector<double> seconds = measure_pieces(pieces, *model, tensors);
  tensors = {input};
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    tensors = as_leaves(pieces[i].forward(tensors));
    double bytes = 0;
    for (const torch::Tensor& parameter : parameters_of({pieces[i]})) bytes += static_cast<double>(parameter.nbytes());
    profile.pieces.push_back({.name = pieces[i].name,
                              .seconds = seconds[i],
                              .bytes = static_cast<std::int64_t>(bytes),
                              .output_bytes = bytes_of(tensors) / static_cast<double>(samples)});
  }
}

void measure_loss(const Subject& subject, const Datasets& data, Training& training, Profile& profile) {
  const Batch batch = batch_of(data, profile.curves.front().points.back().samples);
  torch::Tensor output;
  {
    const torch::NoGradGuard no_grad;
    output = training.strategy().forward(batch.data);
  }
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const torch::Tensor leaf = output.detach().requires_grad_();
    const Stopwatch watch;
    subject.task.loss(leaf, batch.target).backward();
    seconds.push_back(watch.seconds());
  }
  profile.loss = median(seconds) / static_cast<double>(batch.size());
  profile.output_bytes = static_cast<double>(output.nbytes()) / static_cast<double>(batch.size());
}

double handover_seconds(int threads) {
  Devices devices({.count = threads});
  const auto nothing = [](Device&) {};
  for (int i = 0; i < 10; ++i) devices.run(nothing);
  const Stopwatch watch;
  for (int i = 0; i < kRounds; ++i) devices.run(nothing);
  return watch.seconds() / kRounds;
}

void measure_alone(const Subject& subject, Profile& profile) {
  profile.handover = handover_seconds(profile.cores);
  profile.crowded_handover = handover_seconds(2 * profile.cores);
  Training training(subject);
  const Datasets data = subject.data();
  if (profile.cores > 1)
    profile.curves.push_back(measure_threads(training, data, profile.curves.front(), profile.cores, kForThreads));
  measure_loss(subject, data, training, profile);
  measure_pieces_of(subject, data, profile);
  measure_modules(data, training, profile);
  profile.compression = measure_compression(training.strategy().model());
}

void measure_devices(const Subject& subject, Profile& profile) {
  const Datasets data = subject.data();
  const Curve alone = profile.curves.front();
  if (profile.cores > 1)
    profile.curves.push_back(
        measure_device_threads(subject, data, alone, profile.cores, profile.handover, kForDeviceThreads));
  profile.curves.push_back(
      measure_device_threads(subject, data, alone, 2 * profile.cores, profile.crowded_handover, kForDeviceThreads));
}

std::string parameters_text(const torch::nn::Module& model) {
  std::int64_t elements = 0;
  std::string text;
  for (const auto& [name, parameter] : named_parameters(model)) {
    elements += parameter.numel();
    text += concat(name, ' ', parameter.sizes(), ';');
  }
  std::ostringstream hash;
  hash << std::hex << (hash_of(text) & 0xffffffffU);
  return concat(with_thousands(elements), " parameters (", hash.str(), ")");
}

}  // namespace

std::string model_text(const Task& task, const StrategyOptions& strategy) {
  const PartialModel partial(task.make_model);
  std::string text = concat(task.name, ": ", parameters_text(partial.skeleton()), ", ", name_of(strategy.optimizer));
  for (const auto& [key, value] : values_of(strategy.optimizer))
    if (key == "momentum" && value == 0) text += " without momentum";
  if (strategy.precision == Precision::kBFloat16) text += ", bfloat16";
  if (strategy.clipping.max_norm > 0) text += ", clipped";
  if (strategy.layout) text += concat(", ", name_of(strategy.layout));
  return text;
}

std::string machine_text() {
  const std::string model = proc_value("/proc/cpuinfo", "model name");
  return concat(allotted_cores(), " cores, ", model.empty() ? "a processor without a name" : model);
}

Profile measure(const Subject& subject) {
  Profile profile{
      .model = model_text(subject.task, subject.strategy), .machine = machine_text(), .data = subject.data_text};
  profile.cores = std::max(1, allotted_cores());
  profile = in_ranks(profile.cores, profile, [&](const World& world, Profile& found) {
    measure_ranks(world, subject, found);
    measure_collectives(world, found);
  });
  const bool crowd_fits = 2 * profile.cores * profile.memory_of_rank.back().bytes < kMostMemory * available_bytes();
  profile = in_ranks(2 * profile.cores, profile, [&](const World& world, Profile& found) {
    found.crowded_barrier = barrier_seconds(world);
    if (crowd_fits) measure_crowd(world, subject, found);
  });
  profile = in_ranks(1, profile, [&](const World&, Profile& found) { measure_alone(subject, found); });
  // In processes of their own: memory that was freed before would hide what connections take.
  profile = in_ranks(1, profile, [](const World&, Profile& found) { measure_loopback(found); });
  profile = in_ranks(1, profile, [](const World&, Profile& found) { measure_messages(found); });
  if (crowd_fits)
    profile = in_ranks(1, profile, [&](const World&, Profile& found) { measure_devices(subject, found); });
  require_possible_numbers(profile, "what was measured");
  return profile;
}

void require_profile_of(const Profile& profile, const Subject& subject, bool any_machine) {
  const std::string model = model_text(subject.task, subject.strategy);
  if (profile.model != model)
    throw UsageError(
        {.what = "the profile is of another model",
         .here = concat("profile: ", profile.model, "; asked for: ", model),
         .next = "name the model and the optimizer that it was made with, or another file: a new one is made"});
  if (profile.data != subject.data_text)
    throw UsageError({.what = "the profile was made with other data",
                      .here = concat("profile: ", profile.data, "; asked for: ", subject.data_text),
                      .likely = "samples of another size take other times",
                      .next = "name the data that it was made with, or another file: a new one is made"});
  if (any_machine || profile.machine == machine_text()) return;
  throw UsageError({.what = "the profile is of another machine",
                    .here = concat("profile: ", profile.machine, "; here: ", machine_text()),
                    .next = "make one here, or say with --other-machine that the target's machines are like that one"});
}

}  // namespace lockstep::plan
