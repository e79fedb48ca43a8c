// SPDX-License-Identifier: Apache-2.0
// data/formats/dataset_request.h: the text of --data, "KIND[:PATH][?KEY=VALUE&KEY=VALUE]", taken apart.
//
// Flow:    DataSource -> DatasetRequest -> the function that opens its kind (open_dataset.cc)
// Threads: one thread
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {

class DatasetRequest {
 public:
  explicit DatasetRequest(const DataSource& source);  // throws UsageError: an option without "="

  const std::string& kind() const { return kind_; }
  const std::string& augment() const { return augment_; }
  const std::string& path() const;  // throws UsageError: none
  std::string path_or(const std::string& otherwise) const { return path_.empty() ? otherwise : path_; }

  // The value of an option, which counts as used from then on. Throws UsageError: not a number.
  std::string text(const std::string& key, const std::string& otherwise);
  double number(const std::string& key, double otherwise);
  std::int64_t whole(const std::string& key, std::int64_t otherwise);

  // Call it when all options were read. Throws UsageError: one that was not used, --augment without images.
  void require_all_used(bool has_images) const;

  UsageError refuse(const std::string& why) const;

 private:
  std::string whole_;
  std::string augment_;
  std::string kind_;
  std::string path_;
  std::map<std::string, std::string> options_;  // not used yet
};

}  // namespace lockstep
