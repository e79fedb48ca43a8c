// SPDX-License-Identifier: Apache-2.0
#include "lockstep/device_place.h"

#include <algorithm>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

UsageError no_device(const std::string& text) {
  return UsageError({.what = concat("--devices: \"", text, "\" names no device"),
                     .next = "give auto, cuda, cpu, GPUs such as cuda:0,cuda:1, or cores such as cpu:0-3,cpu:4-7"});
}

// "4" or "0-3"
CoreSet cores_named(const std::string& text) {
  const auto ends = split(text, '-');
  int first = 0, last = 0;
  if (ends.empty() || ends.size() > 2 || !parse_int(ends.front(), first) || !parse_int(ends.back(), last) ||
      first < 0 || last < first)
    throw no_device("cpu:" + text);
  CoreSet cores;
  for (int core = first; core <= last; ++core) cores.push_back(core);
  return cores;
}

DevicePlace place_named(const std::string& text) {
  if (text.starts_with("cpu:")) return {.cores = cores_named(text.substr(4))};
  int index = 0;
  if (!text.starts_with("cuda:") || !parse_int(std::string_view(text).substr(5), index) || index < 0 || index > 127)
    throw no_device(text);
  return {.device = {torch::kCUDA, static_cast<c10::DeviceIndex>(index)}};
}

}  // namespace

std::vector<DevicePlace> parse_device_places(const std::string& text) {
  std::vector<DevicePlace> places;
  for (const std::string& each : split(text, ',')) places.push_back(place_named(each));
  if (places.empty()) throw no_device(text);
  for (const DevicePlace& place : places)
    require(place.device.type() == places.front().device.type(), concat("--devices ", text, " has GPUs beside cores"),
            "give devices of one kind");
  return places;
}

std::vector<std::string> names_of(const std::vector<DevicePlace>& places) {
  std::vector<std::string> names;
  for (const auto& [device, cores] : places) {
    const std::string name = device.is_cpu() ? concat("cpu:", names.size()) : device.str();
    const bool again = std::ranges::find(names, name) != names.end();
    names.push_back(again ? concat(name, " (device ", names.size(), ")") : name);
  }
  return names;
}

std::vector<DevicePlace> even_places(torch::DeviceType type, int count) {
  std::vector<DevicePlace> places(to_size(count));
  if (type == torch::kCPU) return places;
  for (int i = 0; i < count; ++i) places[to_size(i)].device = {type, static_cast<c10::DeviceIndex>(i)};
  require_gpus(count - 1);
  return places;
}

}  // namespace lockstep
