// SPDX-License-Identifier: Apache-2.0
// train/options/option_table.h: one row per option of `lockstep train`: its name, field, help and range, and whether a resumed
// run must have the same value.
//
// Flow:    option_table() in options.cc -> add_options(), check_options(), resume_fingerprint()
// Threads: a row refers to the fields of a TrainOptions, which must outlive it
#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "lockstep/base/names.h"
#include "lockstep/deadline.h"
#include "lockstep/train/options/options.h"

namespace lockstep {

// Tells whether --resume refuses another value than the checkpoint was made with. It has no default, so that a row without
// it does not compile.
struct OnResume {
  constexpr OnResume(bool is_compared, bool is_used) : compared(is_compared), used(is_used) {}
  bool compared;
  bool used;  // false: other options make this one irrelevant, and any value will do
};
inline constexpr OnResume kMayChange{false, true};  // where, how fast or how long, but not what is computed
inline constexpr OnResume kSame{true, true};
constexpr OnResume same_if(bool used) { return {true, used}; }

// The numbers that an option may be. Who gives another one is shown the option's help.
struct Limits {
  double at_least = -std::numeric_limits<double>::infinity();
  double below = std::numeric_limits<double>::infinity();
};
inline constexpr Limits kFromOne{.at_least = 1};
inline constexpr Limits kFromZero{.at_least = 0};

struct Option {
  std::string name;  // "--batch-size"
  std::string help;
  OnResume on_resume;
  std::function<Json()> value;           // of the field, as the command line spells it
  Limits limits = {};                    // of a number
  std::vector<std::string> names = {};   // the values there are, if they have names
  std::function<void(CLI::App&)> add{};  // to a parser, which then writes into the field
  bool offered = true;                   // false: this program's command line leaves it out
  bool common = false;                   // true: --help shows it, too, not only --help-all
};

std::vector<Option> option_table(TrainOptions& options, const Choices& choices);

// ---- Kinds of rows

// The command line gives a Value, which `set` takes.
template <class Value>
Option typed(Option row, std::function<void(const Value&)> set, const std::string& default_text) {
  row.add = [=](CLI::App& app) {
    CLI::Option* const added = app.add_option_function<Value>(row.name, set, row.help)->default_str(default_text);
    if (!row.names.empty()) added->check(CLI::IsMember(row.names));
    if constexpr (std::is_same_v<Value, std::vector<int>>) added->delimiter(',');
  };
  return row;
}

// A switch: `set` gets true if it is given.
inline Option switched(Option row, std::function<void(const bool&)> set) {
  row.add = [=](CLI::App& app) {
    app.add_flag_function(
        row.name, [set](int64_t times) { set(times > 0); }, row.help);
  };
  return row;
}

// A value that goes by name.
inline Option choice(const std::string& name, const std::vector<std::string>& names, std::function<std::string()> get,
                     std::function<void(const std::string&)> set, OnResume on_resume, const std::string& help) {
  return typed<std::string>({.name = name, .help = help, .on_resume = on_resume, .value = get, .names = names},
                            std::move(set), get());
}

template <HasNames Value>
Option option(const std::string& name, Value& field, OnResume on_resume, const std::string& help) {
  return choice(
      name, all_names<Value>(), [&field] { return name_of(field); },
      [&field, name](const std::string& text) { field = value_named<Value>(text, name); }, on_resume, help);
}

template <class Value>
requires(!HasNames<Value>) Option
    option(const std::string& name, Value& field, OnResume on_resume, const std::string& help, Limits limits = {}) {
  std::string default_text;
  if constexpr (!std::is_same_v<Value, std::vector<int>>) default_text = concat(field);
  return typed<Value>(
      {.name = name, .help = help, .on_resume = on_resume, .value = [&field] { return Json(field); }, .limits = limits},
      [&field](const Value& value) { field = value; }, default_text);
}

// A duration that the command line gives in seconds.
inline Option seconds(const std::string& name, std::chrono::milliseconds& field, OnResume on_resume,
                      const std::string& help, double at_least = std::numeric_limits<double>::min()) {
  using Seconds = std::chrono::duration<double>;
  const auto get = [&field] { return Seconds(field).count(); };
  const auto set = [&field](double value) {
    field =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::min(Seconds(value), Seconds(Deadline::kLongest)));
  };
  return typed<double>(
      {.name = name, .help = help, .on_resume = on_resume, .value = get, .limits = {.at_least = at_least}}, set,
      concat(get()));
}

// Giving it sets the field to `on`.
inline Option flag(const std::string& name, bool& field, OnResume on_resume, const std::string& help, bool on = true) {
  return switched(
      {.name = name, .help = help, .on_resume = on_resume, .value = [&field, on] { return Json(field == on); }},
      [&field, on](bool given) { field = given == on; });
}

}  // namespace lockstep
