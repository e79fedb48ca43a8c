// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/in_autograd.h"

namespace lockstep {
namespace {

AutogradRunner autograd_runner = [](const std::function<void()>& call) { call(); };

}  // namespace

void in_autograd(const std::function<void()>& call) { autograd_runner(call); }
void set_autograd_runner(AutogradRunner runner) { autograd_runner = runner; }

}  // namespace lockstep
