// SPDX-License-Identifier: Apache-2.0
// train/option_table.h: one row per option of `lockstep train`: its name, field, help and range, and whether a resumed
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
#include "lockstep/train/options.h"

namespace lockstep {

// Whether --resume refuses another value than the checkpoint was made with. It has no default, so that a row without
// it does not compile.
struct OnResume {
  constexpr OnResume(bool is_compared, bool is_used) : compared(is_compared), used(is_used) {}
  bool compared;
  bool used;  // false: other options make this one irrelevant, and any value will do
};
inline constexpr OnResume kMayChange{false, true};  // where, how fast or how long, but not what is computed
inline constexpr OnResume kMustBeSame{true, true};
constexpr OnResume must_be_same_if(bool used) { return {true, used}; }

// The numbers that an option may be; and what to tell who gives another one.
struct Limits {
  double at_least = -std::numeric_limits<double>::infinity();
  double below = std::numeric_limits<double>::infinity();
  const char* next = "";
};

struct Option {
  std::string name;  // "--batch-size"
  std::string help;
  OnResume on_resume;
  std::function<void(CLI::App&)> add;   // to a parser, which then writes into the field
  std::function<Json()> value;          // of the field, as the command line spells it
  std::vector<std::string> names = {};  // the values there are, if they have names
  std::function<void()> check = [] {};  // throws UsageError naming the option
  bool offered = true;                  // false: this program's command line leaves it out
};

std::vector<Option> option_table(TrainOptions& options, const Choices& choices);

// ---- Kinds of rows

// A value that goes by name.
inline Option choice(const std::string& name, std::vector<std::string> names, std::function<std::string()> get,
                     std::function<void(const std::string&)> set, OnResume on_resume, std::string help) {
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add =
              [=](CLI::App& app) {
                app.add_option_function<std::string>(name, set, help)->check(CLI::IsMember(names))->default_str(get());
              },
          .value = get,
          .names = names};
}

template <HasNames Value>
Option option(const std::string& name, Value& field, OnResume on_resume, std::string help) {
  return choice(
      name, all_names<Value>(), [&field] { return name_of(field); },
      [&field, name](const std::string& text) { field = value_named<Value>(text, name); }, on_resume, std::move(help));
}

inline Option option(const std::string& name, std::string& text, OnResume on_resume, std::string help) {
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add = [=, &text](CLI::App& app) { app.add_option(name, text, help)->capture_default_str(); },
          .value = [&text] { return Json(text); }};
}

inline Option option(const std::string& name, std::vector<int>& list, OnResume on_resume, std::string help) {
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add = [=, &list](CLI::App& app) { app.add_option(name, list, help)->delimiter(','); },
          .value = [&list] { return Json(list); }};
}

void check_limits(const std::string& name, double value, const Limits& limits);  // throws UsageError

template <class Number>
requires std::is_arithmetic_v<Number> Option option(const std::string& name, Number& field, OnResume on_resume,
                                                    std::string help, Limits limits = {}) {
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add = [=, &field](CLI::App& app) { app.add_option(name, field, help)->capture_default_str(); },
          .value = [&field] { return Json(field); },
          .check = [=, &field] { check_limits(name, static_cast<double>(field), limits); }};
}

// A duration that the command line gives in seconds.
inline Option seconds(const std::string& name, std::chrono::milliseconds& field, OnResume on_resume, std::string help) {
  const auto get = [&field] { return std::chrono::duration<double>(field).count(); };
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add =
              [=, &field](CLI::App& app) {
                const auto set = [&field](double value) {
                  field = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(value));
                };
                app.add_option_function<double>(name, set, help)->default_str(concat(get()));
              },
          .value = get,
          .check =
              [=] {
                check_limits(name, get(),
                             {.at_least = std::numeric_limits<double>::min(), .next = "give seconds, such as 300"});
              }};
}

// A switch: giving it sets the field to `on`.
inline Option flag(const std::string& name, bool& field, OnResume on_resume, std::string help, bool on = true) {
  return {.name = name,
          .help = help,
          .on_resume = on_resume,
          .add =
              [=, &field](CLI::App& app) {
                const auto set = [&field, on](std::int64_t times) { field = times > 0 ? on : !on; };
                app.add_flag_function(name, set, help);
              },
          .value = [&field, on] { return Json(field == on); }};
}

}  // namespace lockstep
