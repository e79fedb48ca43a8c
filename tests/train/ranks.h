// SPDX-License-Identifier: Apache-2.0
// tests/train/ranks.h: the ranks of a training program as children of the test. No launcher watches them, so each rank
// has to notice itself that another one is lost.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/sockets/port.h"
#include "tests/launch/child.h"
#include "tests/train/command.h"

namespace lockstep::testing {

class Ranks {
 public:
  // Starts `command` once per rank of one machine, with torchrun's variables and `more`. Rank 0 writes metrics.
  Ranks(int count, const Words& command, std::map<std::string, std::string> more = {});

  int count() const { return children_.size(); }
  Child& operator[](int rank) { return *children_[rank]; }
  std::string metrics() const { return folder_.file("metrics.jsonl"); }
  std::vector<double> losses() const { return losses_in(metrics()); }
  bool have_made(size_t steps) const;  // waits for it

 private:
  TempFolder folder_;
  ReservedPort port_;
  IntVector<std::unique_ptr<Child>> children_;
};

}  // namespace lockstep::testing
