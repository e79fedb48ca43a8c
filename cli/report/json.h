// SPDX-License-Identifier: Apache-2.0
// cli/report/json.h: what the parts of `lockstep report` hand each other, and what the page gets: JSON.
//
// Threads: any
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::report {

using Json = nlohmann::ordered_json;

// The value of `key`, or nothing where it is missing or of another kind.
inline const Json* find(const Json& object, const std::string& key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}
inline bool has_number(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_number();
}
inline std::string text_of(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : "";
}

// Nothing but `discarded` for what is no JSON.
inline Json parse(const std::string& text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

// Of a file whose `about` says in which format it is. Throws DataError: a newer one than `known`.
inline void require_known_format(const Json& about, int known, const std::string& file) {
  if (!has_number(about, "format") || about.at("format").get<double>() <= known) return;
  throw DataError(
      {.what = concat(file, " is in format ", about.at("format").dump(), ", and this lockstep knows ", known),
       .likely = "a newer lockstep has written it",
       .next = "make the report with the lockstep that trained"});
}

}  // namespace lockstep::report
