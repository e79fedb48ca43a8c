// SPDX-License-Identifier: Apache-2.0
// base/names.h: the text of enumerators. One table per type serves the command line, its help, errors and metrics.
//
//   template <>
//   inline constexpr auto kNames<Precision> = in_order<Precision>({"float32", ...});
//
// Threads: pure functions
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

template <class Value>
struct Named {
  const char* name;
  Value value;
};
template <class Value>
Named(const char*, Value) -> Named<Value>;

// The names of all values of an enum, in its order.
template <class Value, size_t N>
constexpr std::array<Named<Value>, N> in_order(const char* const (&names)[N]) {
  std::array<Named<Value>, N> all{};
  for (size_t i = 0; i < N; ++i) all[i] = {names[i], static_cast<Value>(i)};
  return all;
}

// Specialised for each type that has names, next to the type or in one list of a folder.
template <class Value>
inline constexpr std::nullptr_t kNames = nullptr;

template <class Value>
concept HasNames = !std::is_same_v<decltype(kNames<Value>), const std::nullptr_t>;

template <HasNames Value>
std::string name_of(const Value& value) {
  const auto* const found = std::ranges::find(kNames<Value>, value, &Named<Value>::value);
  return found == kNames<Value>.end() ? "unknown" : found->name;
}

// The names in any table with a column `name`.
template <class Table>
std::vector<std::string> names_in(const Table& table) {
  std::vector<std::string> names;
  for (const auto& each : table) names.emplace_back(each.name);
  return names;
}

template <HasNames Value>
std::vector<std::string> all_names() {
  return names_in(kNames<Value>);
}

// The row with this name. Throws UsageError that lists the names: "--layout nhwc: there is no such value".
template <class Table>
const auto& row_named(const Table& table, std::string_view name, std::string_view option) {
  for (const auto& row : table)
    if (name == row.name) return row;
  throw UsageError({.what = concat(option, ' ', name, ": there is no such value"),
                    .next = concat("give one of ", join(names_in(table), ", "))});
}

template <HasNames Value>
Value value_named(std::string_view name, std::string_view option) {
  return row_named(kNames<Value>, name, option).value;
}

}  // namespace lockstep
