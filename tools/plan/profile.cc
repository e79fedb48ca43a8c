// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/profile.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::plan {

using ProfileJson = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTimes, samples, forward, backward, update)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Curve, at_once, threads, in_one_process, points)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PieceTimes, name, seconds, bytes, output_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SizedTime, bytes, seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SizedMemory, samples, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Profile, model, machine, data, cores, parameter_bytes, state_bytes, tensors, dataset,
                                   curves, spread, pieces, common_bytes, idle_bytes, memory_of_rank, copy_speed,
                                   copy_speed_of_all, loopback, loopback_work, connection_bytes)

namespace {

// No number of a profile may be negative or infinite.
bool has_only_amounts(const ProfileJson& json) {
  if (json.is_structured()) return std::ranges::all_of(json, has_only_amounts);
  return !json.is_number() || (std::isfinite(json.get<double>()) && json.get<double>() >= 0);
}

// Device threads of a small model may take no time beside what handing work over takes.
bool is_possible(const Curve& curve) {
  const auto& points = curve.points;
  const auto takes_no_time = [](const StepTimes& each) { return each.computing() <= 0; };
  return !points.empty() && points.front().samples > 0 && curve.at_once >= 1 && curve.threads >= 1 &&
         std::ranges::is_sorted(points, std::ranges::less_equal(), &StepTimes::samples) &&
         (curve.at_once > 1 || std::ranges::none_of(points, takes_no_time));
}

template <class Parts>
bool are_positive(const Parts& parts, auto member) {
  return std::ranges::all_of(parts, [&](const auto& each) { return std::invoke(member, each) > 0; });
}

// The first field with a number that can't be, or "".
std::string impossible_field(const Profile& p) {
  constexpr int kMostCores = 4096;
  const std::pair<const char*, bool> fields[] = {
      {"cores", p.cores >= 1 && p.cores <= kMostCores},
      {"curves", !p.curves.empty() && p.curves.front().at_once == 1 && p.curves.front().threads == 1 &&
                     std::ranges::all_of(p.curves, is_possible)},
      {"spread", std::ranges::is_sorted(p.spread) && are_positive(p.spread, std::identity())},
      {"pieces",
       p.pieces.empty() || std::ranges::any_of(p.pieces, [](const PieceTimes& each) { return each.seconds > 0; })},
      {"memory_of_rank", are_positive(p.memory_of_rank, &SizedMemory::bytes)},
      {"copy_speed", p.copy_speed > 0},
      {"loopback", are_positive(p.loopback, &SizedTime::seconds) && are_positive(p.loopback_work, &SizedTime::seconds)},
      {"a negative or infinite number", has_only_amounts(p)},
  };
  const auto wrong = std::ranges::find(fields, false, &std::pair<const char*, bool>::second);
  return wrong == std::end(fields) ? "" : wrong->first;
}

}  // namespace

// Beyond the first and the last point their lines go on, but no share of a step takes less than its share of the samples.
StepTimes times_for(const Curve& curve, double samples) {
  const auto& points = curve.points;
  std::vector<double> updates;
  for (const StepTimes& point : points) updates.push_back(point.update);
  StepTimes result{.samples = static_cast<int64_t>(std::ceil(samples)), .update = median(updates)};
  if (samples <= 0) return result;
  size_t after = std::min<size_t>(1, points.size() - 1);  // the first point that is not before it, or the last
  while (after + 1 < points.size() && static_cast<double>(points[after].samples) < samples) ++after;
  const StepTimes &a = points[after == 0 ? 0 : after - 1], &b = points[after];
  const auto at_a = static_cast<double>(a.samples), at_b = static_cast<double>(b.samples);
  for (double StepTimes::*const part : {&StepTimes::forward, &StepTimes::backward}) {
    const double slope = after == 0 ? b.*part / at_b : (b.*part - a.*part) / (at_b - at_a);
    const double least = std::min(a.*part, b.*part) * std::min(1.0, samples / at_a);
    result.*part = std::max(a.*part + slope * (samples - at_a), least);
  }
  return result;
}

// Two machines that reduce a small array send each other its signature and the array: four messages.
Line work_of_messages(const Profile& profile) {
  const auto& two = profile.loopback_work;
  if (two.empty()) return {};
  return {.fixed = two.front().seconds / 4, .per_byte = line_through(two).per_byte / 2};
}

// Least squares, each point with the weight 1/seconds^2, so that small messages count as much as large.
Line line_through(const std::vector<SizedTime>& points) {
  double w = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const SizedTime& point : points) {
    const double weight = 1 / (point.seconds * point.seconds);
    w += weight;
    x += weight * point.bytes;
    y += weight * point.seconds;
    xx += weight * point.bytes * point.bytes;
    xy += weight * point.bytes * point.seconds;
  }
  const double spread = w * xx - x * x;
  if (points.empty()) return {};
  if (spread <= 0) return {.fixed = y / w};
  const double slope = std::max(0.0, (w * xy - x * y) / spread);
  return {.fixed = std::max(0.0, (y - slope * x) / w), .per_byte = slope};
}

std::string text_of(const Profile& profile) {
  ProfileJson json = profile;
  json["format"] = kProfileFormat;
  return json.dump(1) + "\n";
}

Profile profile_in(const std::string& text, const std::string& source) {
  constexpr const char* kNext = "remove it: lockstep plan --profile makes a new one";
  try {
    ProfileJson json = ProfileJson::parse(text);
    if (json.contains("format") && json.at("format") == kProfileFormat) {
      json.emplace("copy_speed_of_all", 0);  // older profiles lack it
      return json.get<Profile>();
    }
  } catch (const nlohmann::json::exception& error) {
    throw DataError({.what = source + " is damaged, or not a profile", .here = error.what(), .next = kNext});
  }
  throw DataError({.what = source + " is not a profile, or one of another version of lockstep", .next = kNext});
}

void require_possible_numbers(const Profile& profile, const std::string& source) {
  const std::string field = impossible_field(profile);
  if (!field.empty())
    throw DataError({.what = source + " has impossible numbers",
                     .here = field,
                     .likely = "a measurement that failed, or a file that was changed",
                     .next = "make a new one: lockstep plan --profile with another file"});
}

void save_profile(const std::filesystem::path& file, const Profile& profile) {
  require_possible_numbers(profile, "the profile");
  write_file(file, text_of(profile));
}

Profile load_profile(const std::filesystem::path& file) {
  Profile profile = profile_in(read_file(file), file.string());
  require_possible_numbers(profile, file.string());
  return profile;
}

}  // namespace lockstep::plan
