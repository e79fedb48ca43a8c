// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_curves.h"

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/plan/forecast.h"

namespace lockstep::bench {
namespace {

using plan::Method;

// Blocks that are alike: parameters and multiplications (millions, for an image of 224 x 224) of all together.
struct Blocks {
  const char* name;
  int count;
  double parameters;
  double millions;
};

struct Architecture {
  const char* name;
  std::vector<Blocks> blocks;
};

// He et al., 2016 (ResNet, with batch normalisation), and Simonyan and Zisserman, 2015 (VGG).
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = {
      {"ResNet-50",
       {{"conv1", 1, 9'536, 118},
        {"layer1", 3, 215'808, 668},
        {"layer2", 4, 1'219'584, 1'028},
        {"layer3", 6, 7'098'368, 1'464},
        {"layer4", 3, 14'964'736, 809},
        {"fc", 1, 2'049'000, 2}}},
      {"ResNet-101",
       {{"conv1", 1, 9'536, 118},
        {"layer1", 3, 215'808, 668},
        {"layer2", 4, 1'219'584, 1'028},
        {"layer3", 23, 26'090'496, 5'177},
        {"layer4", 3, 14'964'736, 809},
        {"fc", 1, 2'049'000, 2}}},
      {"ResNet-152",
       {{"conv1", 1, 9'536, 118},
        {"layer1", 3, 215'808, 668},
        {"layer2", 8, 2'339'840, 1'901},
        {"layer3", 36, 40'613'888, 8'015},
        {"layer4", 3, 14'964'736, 809},
        {"fc", 1, 2'049'000, 2}}},
      {"VGG-16",
       {{"conv1", 2, 38'720, 1'936},
        {"conv2", 2, 221'440, 2'775},
        {"conv3", 3, 1'475'328, 4'624},
        {"conv4", 3, 5'899'776, 4'624},
        {"conv5", 3, 7'079'424, 1'387},
        {"fc6", 1, 102'764'544, 103},
        {"fc7", 1, 16'781'312, 17},
        {"fc8", 1, 4'097'000, 4}}},
  };
  return all;
}

const Architecture& architecture(const std::string& name) {
  const auto& all = architectures();
  const auto found = std::ranges::find(all, name, &Architecture::name);
  if (found == all.end()) throw UsageError({.what = concat("no architecture ", name)});
  return *found;
}

const char* const kHorovod = "Horovod's docs/benchmarks.rst and, for 32 machines, its first README";
const char* const kGoyal = "Goyal et al., 2017 (arXiv:1706.02677)";
const char* const kTensorFlow = "TensorFlow 1's performance/benchmarks.md, EC2 distributed, synthetic data";

double samples_per_second(const plan::Profile& profile, const plan::Target& target, const plan::Choice& choice) {
  return static_cast<double>(target.batch) / plan::forecast(profile, target, choice).step;
}

}  // namespace

// Speeds of one machine are TensorFlow's (performance/benchmarks.md, May 2017, synthetic data): P100 in a DGX-1 with 64 images per
// GPU, for ResNet-50 with 8 GPUs those with 32; K80 on EC2. ResNet-101, which is not there, lies between ResNet-50 and -152 by its
// multiplications.
const std::vector<PublishedCurve>& published_curves() {
  static const std::vector<PublishedCurve> all = {
      {.model = "ResNet-101",
       .source = kHorovod,
       .devices = "4 P100",
       .samples = 502,
       .inside = 502 / 517.5,
       .batch = 256,
       .link_gigabits = 25,
       .latency = 10e-6,
       .published = {{.machines = 32, .efficiency = 0.90}, {.machines = 128, .efficiency = 0.90}},
       .forecast_only = {8, 1024}},
      {.model = "VGG-16",
       .source = kHorovod,
       .devices = "4 P100",
       .samples = 584,
       .inside = 584 / 616.0,
       .batch = 256,
       .link_gigabits = 25,
       .latency = 10e-6,
       .published = {{.machines = 32, .efficiency = 0.79}, {.machines = 128, .efficiency = 0.68}},
       .forecast_only = {8, 1024}},
      {.model = "ResNet-50",
       .source = kGoyal,
       .devices = "8 P100",
       .samples = 1485,
       .batch = 256,
       .link_gigabits = 50,
       .latency = 10e-6,
       .published = {{.machines = 32, .efficiency = 0.90}},
       .forecast_only = {8, 128, 1024}},
      {.model = "ResNet-50",
       .source = kTensorFlow,
       .devices = "8 K80",
       .samples = 378,
       .batch = 512,
       .link_gigabits = 10,
       .latency = 100e-6,
       .method = Method::kStoreSync,
       .published = {{.machines = 2, .efficiency = 751 / (2 * 378.0), .servers = 2},
                     {.machines = 4, .efficiency = 1388 / (4 * 378.0), .servers = 4},
                     {.machines = 8, .efficiency = 2744 / (8 * 378.0), .servers = 8}},
       .forecast_only = {16}},
      {.model = "ResNet-152",
       .source = kTensorFlow,
       .devices = "8 K80",
       .samples = 146,
       .batch = 256,
       .link_gigabits = 10,
       .latency = 100e-6,
       .method = Method::kStoreSync,
       .published = {{.machines = 2, .efficiency = 291 / (2 * 146.0), .servers = 2},
                     {.machines = 4, .efficiency = 565 / (4 * 146.0), .servers = 4},
                     {.machines = 8, .efficiency = 981 / (8 * 146.0), .servers = 4}},
       .forecast_only = {16}},
  };
  return all;
}

plan::Profile profile_of(const PublishedCurve& curve) {
  const double seconds = static_cast<double>(curve.batch) / curve.samples;
  plan::Profile profile{.model = curve.model, .machine = curve.devices};
  profile.curves = {{.points = {{.samples = curve.batch, .forward = seconds / 3, .backward = seconds * 2 / 3}}}};
  profile.copy_speed = {1e18};  // bytes per second: takes no time
  profile.memory_of_rank = {{.samples = 1, .bytes = 1}};
  for (const Blocks& blocks : architecture(curve.model).blocks)
    for (int i = 0; i < blocks.count; ++i) {
      const double bytes = blocks.parameters * 4 / blocks.count;
      profile.modules.push_back(
          {.name = blocks.name, .backward = blocks.millions / blocks.count, .bytes = static_cast<std::int64_t>(bytes)});
      profile.tensors.push_back(bytes);
      profile.parameter_bytes += static_cast<std::int64_t>(bytes);
    }
  return profile;
}

double forecast_efficiency(const PublishedCurve& curve, int machines, int servers) {
  const plan::Profile profile = profile_of(curve);
  const plan::Target target{.machines = machines,
                            .devices = 1,
                            .link_rate = curve.link_gigabits * 1e9 / 8,
                            .link_latency = curve.latency,
                            .batch = curve.batch * machines,
                            .servers = servers};
  const double together = samples_per_second(profile, target, {.method = curve.method, .servers = servers});
  return curve.inside * together / (machines * curve.samples);
}

void print_curves(std::ostream& out, Json& json) {
  Table table({"model", "machine", "link", "exchange", "machines", "published", "forecast", "source"});
  for (const PublishedCurve& curve : published_curves()) {
    std::vector<PublishedScaling> all = curve.published;
    const bool has_servers = curve.method == Method::kStoreSync;
    for (const int machines : curve.forecast_only) all.push_back({.machines = machines, .servers = machines});
    std::ranges::sort(all, {}, &PublishedScaling::machines);
    for (const PublishedScaling& each : all) {
      show_progress(concat(curve.model, ", ", each.machines, " machines"));
      const Stopwatch watch;
      const double forecast = forecast_efficiency(curve, each.machines, has_servers ? each.servers : 1);
      table.add({curve.model, curve.devices, concat(fixed(curve.link_gigabits, 0), " Gb/s"),
                 has_servers ? concat("dist_sync, ", each.servers, " servers") : "ddp", concat(each.machines),
                 each.efficiency > 0 ? percent(each.efficiency) : "", percent(forecast), curve.source});
      json["curves"].push_back({{"model", curve.model},
                                {"source", curve.source},
                                {"machine", curve.devices},
                                {"link_gigabits", curve.link_gigabits},
                                {"machines", each.machines},
                                {"servers", has_servers ? each.servers : 0},
                                {"published", each.efficiency},
                                {"forecast", forecast},
                                {"simulated_in_seconds", watch.seconds()}});
    }
  }
  show_progress("");
  table.print(out);
}

}  // namespace lockstep::bench
