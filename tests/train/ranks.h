// tests/train/ranks.h: the ranks of a training program as children of the test: no launcher watches them, so that it
// is up to each of them to find out that another one is lost.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "tests/launch/child.h"
#include "tests/train/command.h"

namespace lockstep::testing {

// A port of 127.0.0.1 that is given to nobody else while this lives; rank 0 can bind it all the same.
class ReservedPort {
 public:
  ReservedPort();
  int number() const { return number_; }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

class Ranks {
 public:
  // `command` once per rank of one machine, with torchrun's variables and `more`. Rank 0 writes its metrics.
  Ranks(int count, const Words& command, std::map<std::string, std::string> more = {});

  int count() const { return static_cast<int>(children_.size()); }
  Child& operator[](int rank) { return *children_[static_cast<std::size_t>(rank)]; }
  std::vector<double> losses() const { return losses_in(metrics()); }
  bool have_made(std::size_t steps) const;  // waits for it

 private:
  std::string metrics() const { return folder_.file("metrics.jsonl"); }

  TempFolder folder_;
  ReservedPort port_;
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace lockstep::testing
