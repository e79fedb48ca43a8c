// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/measure.h"

#include <signal.h>
#include <sys/mman.h>

#include <cstring>

#include <ATen/Parallel.h>

#include "agent/clusters/environment.h"
#include "agent/start/launcher.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/files/write_all.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::plan {
namespace {

// Seconds for steps: of ranks that have a core each; of one process with all cores.
constexpr double kForSteps = 7, kForTogether = 3;

// Runs `body` in so many ranks, each with its share of the cores; returns what rank 0 has put into the profile.
Profile in_ranks(int ranks, const Profile& so_far, const std::function<void(const World&, Profile&)>& body) {
  const UniqueFd result(::memfd_create("lockstep profile", MFD_CLOEXEC));
  if (!result) throw system_error("make", "a memfd");
  const auto rank = [&] {
    keep_freed_memory();
    at::set_num_threads(1);
    Profile profile = so_far;
    const World world = World::from_env();
    body(world, profile);
    if (world.rank() == 0 && !write_all(result.get(), text_of(profile)))
      throw system_error("write", "what was measured");
    return 0;
  };
  const LaunchResult ended = launch({.ranks = ranks, .first_is_plain = true}, rank);
  if (!ended.failure && ended.exit_code > 128) ::raise(ended.exit_code - 128);  // the signal that launch() has taken
  if (ended.exit_code != 0)
    throw SystemError({.what = concat("a process that measures has ended with code ", ended.exit_code),
                       .likely = ended.failure ? describe(*ended.failure) : "it was asked to stop",
                       .next = "does `lockstep train` with the same options work?"});
  return profile_in(read_file(concat("/proc/self/fd/", result.get())), "what was measured");
}

double bytes_copied_per_second() {
  constexpr size_t kCopied = size_t{32} << 20;
  const Tensor from = torch::ones({kCopied}, torch::kUInt8), to = torch::ones({kCopied}, torch::kUInt8);
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const Stopwatch watch;
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kCopied);
    seconds.push_back(watch.seconds());
  }
  return 2.0 * kCopied / median(seconds);
}

// ---- As many ranks as cores: steps alone and at once, and memory, first without a model

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
    profile.tensors.push_back(to_double(parameter.nbytes()));
    profile.parameter_bytes += to_double(parameter.nbytes());
    for (const auto& [key, state] : training.strategy().optimizer().state_of(parameter))
      if (state.defined()) profile.state_bytes += to_double(state.nbytes());
  }
  world.barrier();
  profile.copy_speed_of_all = sum_of(world, bytes_copied_per_second());
}

// ---- One process with all cores: copies, threads, modules, pieces

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors)
    if (tensor.defined()) bytes += to_double(tensor.nbytes());
  return bytes;
}

// A model that can't be cut has no pieces.
void measure_pieces_of(const Subject& subject, const Datasets& data, Profile& profile) {
  const int64_t measured = profile.curves.front().points.back().samples;
  const int64_t samples = std::clamp<int64_t>(subject.batch / 4, 1, measured);
  const ModulePtr model = subject.task.make_model();
  const Layout layout = subject.strategy.layout.value_or(preferred_layout(*model, torch::kCPU));
  set_layout(*model, layout);
  Batch batch = batch_of(data, samples);
  batch.data = in_layout(batch.data, layout);
  std::vector<Piece> pieces;
  try {
    pieces = pieces_of(subject.task, *model);
  } catch (const UsageError&) {
    return;
  }
  Tensors tensors = inputs_of(batch);
  const std::vector<double> seconds = measure_pieces(pieces, *model, tensors);
  tensors = inputs_of(batch);
  for (size_t i = 0; i < pieces.size(); ++i) {
    tensors = as_leaves(pieces[i].forward(tensors));
    profile.pieces.push_back({.name = pieces[i].name,
                              .seconds = seconds[i],
                              .bytes = bytes_of(parameters_of({pieces[i]})),
                              .output_bytes = bytes_of(tensors) / to_double(samples)});
  }
}

void measure_alone(const Subject& subject, Profile& profile) {
  profile.copy_speed = bytes_copied_per_second();
  const Datasets data = subject.data();
  const Curve alone = profile.curves.front();
  measure_pieces_of(subject, data, profile);
  if (profile.cores == 1) return;
  for (const Curve& kind : {Curve{.threads = profile.cores}, Curve{.at_once = profile.cores, .in_one_process = true}})
    profile.curves.push_back(measure_together(subject, data, alone, kind, kForTogether));
}

std::string parameters_text(const torch::nn::Module& model) {
  int64_t elements = 0;
  std::string text;
  for (const auto& [name, parameter] : named_parameters(model)) {
    elements += parameter.numel();
    text += concat(name, ' ', parameter.sizes(), ';');
  }
  return concat(with_thousands(elements), " parameters (", std::hex, hash_of(text) & 0xffffffffU, ")");
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
  Profile profile{.model = model_text(subject.task, subject.strategy),
                  .machine = machine_text(),
                  .data = subject.data_text,
                  .cores = std::max(1, allotted_cores())};
  profile = in_ranks(profile.cores, profile,
                     [&](const World& world, Profile& found) { measure_ranks(world, subject, found); });
  profile = in_ranks(1, profile, [&](const World&, Profile& found) { measure_alone(subject, found); });
  profile = in_ranks(1, profile, [](const World&, Profile& found) { measure_messages(found); });
  require_possible_numbers(profile, "what was measured");
  return profile;
}

void require_profile_of(const Profile& profile, const Subject& subject, bool any_machine) {
  const auto require_same = [](const char* what, const std::string& found, const std::string& asked, const char* next) {
    if (found != asked)
      throw UsageError({.what = concat("the profile ", what),
                        .here = concat("profile: ", found, "; asked for: ", asked),
                        .next = concat(next, ", or name another file: a new profile is made")});
  };
  require_same("is of another model", profile.model, model_text(subject.task, subject.strategy),
               "name the model and the optimizer that it was made with");
  require_same("was made with other data", profile.data, subject.data_text, "name the data that it was made with");
  if (!any_machine)
    require_same("is of another machine", profile.machine, machine_text(),
                 "say with --other-machine that the target's machines are like that one");
}

}  // namespace lockstep::plan
