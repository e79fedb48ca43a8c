// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/thread_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "lockstep/base/process/environment_switch.h"

namespace lockstep {
namespace {

thread_local std::optional<at::Generator> this_threads_generator;

bool takes_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Goes on to torch's own kernel, with the thread's generator where the caller named none.
void name_generator(const c10::OperatorHandle& function, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (this_threads_generator && keys.has(c10::DispatchKey::CPU)) {
    const auto& arguments = function.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
      if (value.isNone() && takes_generator(arguments[i])) value = *this_threads_generator;
    }
  }
  function.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
                           stack);
}

// torch looks for a kernel of BackendSelect before that of the CPU. Random functions of tensors have none of torch's.
// Returns false where that is switched off.
bool stand_before_torchs_random_functions() {
  if (is_switched_off("LOCKSTEP_THREAD_GENERATORS")) return false;
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto function = c10::Dispatcher::singleton().findSchema(name);
    if (!function || name.getNamespace() != "aten") continue;
    if (!function->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (function->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) continue;
    if (std::ranges::any_of(function->schema().arguments(), takes_generator))
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&name_generator>());
  }
  return true;
}

bool thread_generators_are_used() {
  static const bool are_used = stand_before_torchs_random_functions();
  return are_used;
}

}  // namespace

ThreadGenerator::ThreadGenerator(uint64_t seed) {
  static_cast<void>(thread_generators_are_used());
  this_threads_generator = at::make_generator<at::CPUGeneratorImpl>(seed);
}

ThreadGenerator::~ThreadGenerator() { this_threads_generator.reset(); }

std::optional<at::Generator> ThreadGenerator::current() {
  if (!this_threads_generator || !thread_generators_are_used()) return std::nullopt;
  return this_threads_generator;
}

void ThreadGenerator::seed(uint64_t seed) { this_threads_generator->set_current_seed(seed); }

uint64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

}  // namespace lockstep
