// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/coverage.h: how often each feature, each pair of features and each verdict occurred.
#pragma once

#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::fuzz {

class Coverage {
 public:
  // features: sorted, each once.
  void count(const std::vector<std::string>& features, const std::string& verdict) {
    for (const std::string& feature : features) ++features_[feature];
    for (size_t i = 0; i < features.size(); ++i)
      for (size_t k = 0; k < i; ++k) ++pairs_[{features[k], features[i]}];
    ++verdicts_[verdict];
  }

  // With LOCKSTEP_FUZZ_PAIRS every pair, else how many pairs occurred.
  void print() const {
    for (const auto& [verdict, times] : verdicts_) std::cout << "  " << times << "  " << verdict << '\n';
    const size_t possible = features_.size() * (features_.size() - 1) / 2;
    std::cout << "features, " << pairs_.size() << " of " << possible << " pairs of them:\n";
    for (const auto& [feature, times] : features_) std::cout << "  " << times << "  " << feature << '\n';
    if (std::getenv("LOCKSTEP_FUZZ_PAIRS") == nullptr) return;
    for (const auto& [pair, times] : pairs_)
      std::cout << "  " << times << "  " << pair.first << " + " << pair.second << '\n';
  }

 private:
  std::map<std::string, int> verdicts_;
  std::map<std::string, int> features_;
  std::map<std::pair<std::string, std::string>, int> pairs_;
};

// LOCKSTEP_FUZZ_SEED, the seed of the first program; each has the next one.
inline uint64_t first_seed() {
  const char* given = std::getenv("LOCKSTEP_FUZZ_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
}

}  // namespace lockstep::fuzz
