// SPDX-License-Identifier: Apache-2.0
// base/process/in_autograd.h: runs what lockstep does inside of autograd, whose errors leave through a program's backward().
//
// Owns:    nothing
// Threads: set_autograd_runner before any other starts; in_autograd from any
#pragma once

#include <functional>

namespace lockstep {

// Calls `call`. The Python module sets a runner, because of an Error autograd would make a RuntimeError.
void in_autograd(const std::function<void()>& call);

using AutogradRunner = void (*)(const std::function<void()>& call);
void set_autograd_runner(AutogradRunner runner);

}  // namespace lockstep
