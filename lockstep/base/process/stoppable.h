// SPDX-License-Identifier: Apache-2.0
// base/process/stoppable.h: something that lockstep::stop() ends: a member of what has threads or waits.
//
// Owns:    its entry in the list of what this process has
// Threads: any; `end` is called on the thread that calls stop(), never after the destructor has begun to return
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/process/own_process.h"

namespace lockstep {

class Stoppable {
 public:
  using End = std::function<void(const std::string& reason)>;

  // end: does not block, throws nothing, and makes or destroys no Stoppable.
  explicit Stoppable(End end);
  ~Stoppable();
  Stoppable& operator=(Stoppable&&) = delete;

 private:
  friend void stop(const std::string& reason);
  OwnProcess process_;  // a forked child leaves what its parent has alone
  End end_;
};

}  // namespace lockstep
