// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/thread_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bernoulli_native.h>
#include <torch/library.h>

#include <optional>

#include "lockstep/base/process/environment_switch.h"
#include "lockstep/data/loader/random.h"

namespace lockstep {
namespace {

thread_local std::optional<at::Generator> this_threads_generator;

at::Tensor& bernoulli(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  return at::native::bernoulli_(self, p, generator ? generator : this_threads_generator);
}

// The dispatcher warns of every kernel that replaces another; here that is the purpose.
void replace_torchs_bernoulli() {
  if (is_switched_off("LOCKSTEP_THREAD_GENERATORS")) return;
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("bernoulli_.float", bernoulli);
}

}  // namespace

ThreadGenerator::ThreadGenerator(std::uint64_t seed) {
  [[maybe_unused]] static const bool once = (replace_torchs_bernoulli(), true);
  this_threads_generator = at::make_generator<at::CPUGeneratorImpl>(seed);
}

ThreadGenerator::~ThreadGenerator() { this_threads_generator.reset(); }

std::optional<at::Generator> ThreadGenerator::current() { return this_threads_generator; }

void ThreadGenerator::seed(std::uint64_t seed) { this_threads_generator->set_current_seed(seed); }

std::uint64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

std::uint64_t seed_of(std::uint64_t seed, std::int64_t index) {
  return mix_seed(seed, static_cast<std::uint64_t>(index));
}

}  // namespace lockstep
