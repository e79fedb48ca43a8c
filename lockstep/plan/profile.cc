// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/profile.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/machine_collective.h"
#include "lockstep/error.h"

namespace lockstep::plan {

using ProfileJson = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTimes, samples, forward, backward, update)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Curve, at_once, threads, in_one_process, points)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModuleTimes, name, backward, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PieceTimes, name, seconds, bytes, output_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CompressionTimes, kind, sent, encode, decode)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SizedTime, bytes, seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SizedMemory, samples, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Profile, model, machine, data, cores, parameter_bytes, state_bytes, tensors,
                                   output_bytes, dataset, curves, spread, modules, pieces, compression, loss,
                                   common_bytes, idle_bytes, memory_of_rank, copy_speed, barrier, crowded_barrier,
                                   handover, crowded_handover, loopback, loopback_work, message, message_work,
                                   message_work_of_many, connection_bytes, store_link_bytes)

namespace {

double between(double x, double x0, double y0, double x1, double y1) { return y0 + (x - x0) * (y1 - y0) / (x1 - x0); }

constexpr int kMostCores = 4096;

bool is_amount(double value) { return std::isfinite(value) && value >= 0; }

bool are_amounts(std::initializer_list<double> values) { return std::ranges::all_of(values, is_amount); }

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

// Of a small model device threads may take no longer than the handover, which is taken off.
bool can_be(const Curve& curve) {
  std::int64_t before = 0;
  for (const StepTimes& each : curve.points) {
    if (each.samples <= before || !are_amounts({each.forward, each.backward, each.update})) return false;
    if (curve.at_once == 1 && each.forward + each.backward <= 0) return false;
    before = each.samples;
  }
  return curve.at_once >= 1 && curve.threads >= 1 && !curve.points.empty();
}

bool can_be(const std::vector<SizedTime>& times) {
  return std::ranges::all_of(times,
                             [](const SizedTime& each) { return is_amount(each.bytes) && is_positive(each.seconds); });
}

bool can_be(const std::vector<PieceTimes>& pieces) {
  double seconds = 0;
  for (const PieceTimes& each : pieces) {
    if (!are_amounts({each.seconds, static_cast<double>(each.bytes), each.output_bytes})) return false;
    seconds += each.seconds;
  }
  return pieces.empty() || seconds > 0;
}

bool can_be(const std::vector<ModuleTimes>& modules) {
  double backward = 0;
  for (const ModuleTimes& each : modules) {
    if (!are_amounts({each.backward, static_cast<double>(each.bytes)})) return false;
    backward += each.backward;
  }
  return backward > 0;
}

// The first field with a number that can't be, or "".
std::string impossible_field(const Profile& p) {
  if (p.cores < 1 || p.cores > kMostCores) return "cores";
  if (p.curves.empty() || p.curves.front().at_once != 1 || p.curves.front().threads != 1) return "curves";
  for (const Curve& curve : p.curves)
    if (!can_be(curve)) return "curves";
  if (p.parameter_bytes < 0 || !std::ranges::all_of(p.tensors, is_amount)) return "tensors";
  if (p.state_bytes < 0 || p.dataset < 0) return "state_bytes or dataset";
  if (!std::ranges::is_sorted(p.spread) || !std::ranges::all_of(p.spread, is_positive)) return "spread";
  if (!can_be(p.modules)) return "modules";
  if (!can_be(p.pieces)) return "pieces";
  if (!std::ranges::all_of(p.compression, [](const CompressionTimes& each) {
        return are_amounts({each.sent, each.encode, each.decode});
      }))
    return "compression";
  if (!std::ranges::all_of(p.memory_of_rank, [](const SizedMemory& each) { return is_positive(each.bytes); }))
    return "memory_of_rank";
  if (p.copy_speed.empty() || !std::ranges::all_of(p.copy_speed, is_positive)) return "copy_speed";
  if (!can_be(p.loopback) || !can_be(p.loopback_work)) return "loopback";
  if (!are_amounts({p.output_bytes, p.loss, p.common_bytes, p.idle_bytes, p.barrier, p.crowded_barrier, p.handover,
                    p.crowded_handover, p.message, p.message_work, p.message_work_of_many, p.connection_bytes,
                    p.store_link_bytes}))
    return "one of the single numbers";
  return "";
}

}  // namespace

StepTimes times_for(const Curve& curve, double samples) {
  const auto& points = curve.points;
  const StepTimes& first = points.front();
  StepTimes result{.samples = static_cast<std::int64_t>(std::ceil(samples)), .update = median_update(curve)};
  if (samples <= 0) return result;
  if (points.size() == 1) {
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

const Curve& curve_alone(const Profile& profile, bool with_all_threads) {
  const Curve* found = &profile.curves.front();
  for (const Curve& curve : profile.curves)
    if (with_all_threads && curve.at_once == 1 && curve.threads > found->threads) found = &curve;
  return *found;
}

const CompressionTimes& compression_for(const Profile& profile, const std::string& kind) {
  const auto found = std::ranges::find(profile.compression, kind, &CompressionTimes::kind);
  if (found != profile.compression.end()) return *found;
  throw UsageError({.what = concat("the profile does not say what --compression ", kind, " takes"),
                    .next = "make a new one: lockstep plan --profile with another file"});
}

double median_update(const Curve& curve) {
  std::vector<double> seconds;
  for (const StepTimes& point : curve.points) seconds.push_back(point.update);
  return median(seconds);
}

// Least squares of what is measured, each point with the weight 1/seconds^2, so that small messages count as much as large.
// Two machines send each other their signature and then each of c chunks: 2 (start + (c + 1) message) + 2 K byte.
WorkOfMessages work_of_messages(const Profile& profile) {
  const auto& two = profile.loopback_work;
  if (two.size() < 2) return {};
  const auto chunks = [](double bytes) {
    return std::ceil(bytes / static_cast<double>(chunk_bytes(static_cast<std::size_t>(bytes))));
  };
  const SizedTime &small = two[two.size() - 2], &large = two.back();
  const double message = profile.message_work_of_many;
  const double of_messages = 2 * (chunks(large.bytes) - chunks(small.bytes)) * message;
  return {.start = std::max(0.0, two.front().seconds / 2 - 2 * message),
          .message = message,
          .byte = std::max(0.0, (large.seconds - small.seconds - of_messages) / (2 * (large.bytes - small.bytes)))};
}

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
    const ProfileJson json = ProfileJson::parse(text);
    if (json.contains("format") && json.at("format") == kProfileFormat) return json.get<Profile>();
  } catch (const nlohmann::json::exception& error) {
    throw DataError({.what = source + " is damaged, or no profile", .here = error.what(), .next = kNext});
  }
  throw DataError({.what = source + " is not a profile, or one of another version of lockstep", .next = kNext});
}

void require_possible_numbers(const Profile& profile, const std::string& source) {
  const std::string field = impossible_field(profile);
  if (!field.empty())
    throw DataError({.what = source + " has numbers that can't be",
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
