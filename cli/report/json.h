// SPDX-License-Identifier: Apache-2.0
// cli/report/json.h: what the parts of `lockstep report` hand each other, and what the page gets: JSON.
//
// Threads: any
#pragma once

#include <string>

#include <nlohmann/json.hpp>

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

}  // namespace lockstep::report
