// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/profile.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::plan {

using ProfileJson = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTimes, samples, forward, backward, update)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Curve, at_once, threads, in_one_process, points)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModuleTimes, name, forward, backward, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PieceTimes, name, seconds, bytes, output_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CompressionTimes, kind, sent, encode, decode)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SizedTime, bytes, seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Profile, model, machine, cores, parameter_bytes, buffer_bytes, state_bytes, tensors,
                                   output_bytes, dataset, curves, spread, modules, pieces, compression, loss,
                                   common_bytes, idle_bytes, memory_of_rank, copy_speed, barrier, crowded_barrier,
                                   handover, crowded_handover, all_reduce, loopback, loopback_work,
                                   loopback_work_of_four)

namespace {

double between(double x, double x0, double y0, double x1, double y1) { return y0 + (x - x0) * (y1 - y0) / (x1 - x0); }

void require_whole(const Profile& profile, const std::filesystem::path& file) {
  const bool has_points = !profile.curves.empty() &&
                          std::ranges::none_of(profile.curves, [](const Curve& curve) { return curve.points.empty(); });
  if (has_points && !profile.copy_speed.empty() && profile.cores > 0) return;
  throw DataError({.what = concat(file.string(), " is a profile without measurements"),
                   .next = "remove it: lockstep plan --profile makes a new one"});
}

}  // namespace

StepTimes times_for(const Curve& curve, double samples) {
  const auto& points = curve.points;
  const StepTimes& first = points.front();
  StepTimes result{.samples = static_cast<std::int64_t>(std::ceil(samples)), .update = update_seconds(curve)};
  if (samples <= 0) return result;
  if (points.size() == 1 || samples <= 0) {
    const double share = samples / static_cast<double>(first.samples);
    result.forward = first.forward * share;
    result.backward = first.backward * share;
    return result;
  }
  std::size_t after = 1;  // the first point that is not before it, or the last
  while (after + 1 < points.size() && static_cast<double>(points[after].samples) < samples) ++after;
  const StepTimes &a = points[after - 1], &b = points[after];
  const auto line = [&](double at_a, double at_b) {
    const double found = between(samples, static_cast<double>(a.samples), at_a, static_cast<double>(b.samples), at_b);
    return std::max(found, std::min(at_a, at_b) * std::min(1.0, samples / static_cast<double>(a.samples)));
  };
  result.forward = line(a.forward, b.forward);
  result.backward = line(a.backward, b.backward);
  return result;
}

const Curve& curve_for(const Profile& profile, int at_once, int threads) {
  const Curve* best = &profile.curves.front();
  const auto distance = [&](const Curve& curve) {
    return std::abs(at_once - curve.at_once) + 100 * std::abs(threads - curve.threads);
  };
  for (const Curve& curve : profile.curves)
    if (!curve.in_one_process && distance(curve) < distance(*best)) best = &curve;
  return *best;
}

const CompressionTimes& compression_for(const Profile& profile, const std::string& kind) {
  const auto found = std::ranges::find(profile.compression, kind, &CompressionTimes::kind);
  if (found != profile.compression.end()) return *found;
  throw UsageError({.what = concat("the profile does not say what --compression ", kind, " takes"),
                    .next = "make a new one: lockstep plan --profile with another file"});
}

double update_seconds(const Curve& curve) {
  std::vector<double> seconds;
  for (const StepTimes& point : curve.points) seconds.push_back(point.update);
  return median(seconds);
}

// Least squares of what is measured, each point with the weight 1/seconds^2, so that small messages count as much as large.
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

void save_profile(const std::filesystem::path& file, const Profile& profile) {
  ProfileJson json = profile;
  json["format"] = kProfileFormat;
  write_file(file, json.dump(1) + "\n");
}

Profile load_profile(const std::filesystem::path& file) {
  const std::string text = read_file(file);
  try {
    const ProfileJson json = ProfileJson::parse(text);
    if (!json.contains("format") || json.at("format") != kProfileFormat)
      throw DataError({.what = concat(file.string(), " is not a profile, or one of another version of lockstep"),
                       .next = "remove it: lockstep plan --profile makes a new one"});
    const auto profile = json.get<Profile>();
    require_whole(profile, file);
    return profile;
  } catch (const nlohmann::json::exception& error) {
    throw DataError({.what = concat(file.string(), " is damaged, or no profile"),
                     .here = error.what(),
                     .next = "remove it: lockstep plan --profile makes a new one"});
  }
}

}  // namespace lockstep::plan
