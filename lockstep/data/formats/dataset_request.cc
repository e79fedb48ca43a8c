// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/dataset_request.h"

#include <charconv>

#include "lockstep/base/text.h"

namespace lockstep {

DatasetRequest::DatasetRequest(const DataSource& source) : whole_(source.data), augment_(source.augment) {
  const std::size_t question = whole_.find('?');
  const std::string name = whole_.substr(0, question);
  const std::size_t colon = name.find(':');
  kind_ = name.substr(0, colon);
  path_ = colon == std::string::npos ? source.folder : name.substr(colon + 1);
  if (question == std::string::npos) return;
  for (const std::string& option : split(whole_.substr(question + 1), '&')) {
    const std::size_t equals = option.find('=');
    if (equals == std::string::npos) throw refuse(concat("'", option, "' is not KEY=VALUE"));
    options_[option.substr(0, equals)] = option.substr(equals + 1);
  }
}

const std::string& DatasetRequest::path() const {
  if (path_.empty()) throw refuse("it needs a path");
  return path_;
}

std::string DatasetRequest::text(const std::string& key, const std::string& otherwise) {
  const auto found = options_.find(key);
  if (found == options_.end()) return otherwise;
  const std::string value = found->second;
  options_.erase(found);
  return value;
}

double DatasetRequest::number(const std::string& key, double otherwise) {
  const std::string value = text(key, "");
  if (value.empty()) return otherwise;
  double parsed = 0;
  const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (error != std::errc() || stop != value.data() + value.size())
    throw refuse(concat(key, "=", value, " is not a number"));
  return parsed;
}

std::int64_t DatasetRequest::whole(const std::string& key, std::int64_t otherwise) {
  return static_cast<std::int64_t>(number(key, static_cast<double>(otherwise)));
}

void DatasetRequest::require_all_used(bool has_images) const {
  if (!options_.empty()) throw refuse(concat("it has no option ", options_.begin()->first));
  if (!has_images && !augment_.empty())
    throw UsageError({.what = concat("--augment is for images, ", whole_, " has none"), .next = "leave it out"});
}

UsageError DatasetRequest::refuse(const std::string& why) const {
  return UsageError({.what = concat("--data ", whole_, ": ", why), .next = "see docs/data.md"});
}

}  // namespace lockstep
