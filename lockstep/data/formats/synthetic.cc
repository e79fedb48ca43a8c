// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/readers.h"

#include "lockstep/base/text.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kPatterns = 0x7061747465726E73ULL;

void write_synthetic(const SyntheticOptions& options, std::int64_t index, std::uint8_t* into) {
  SampleRandom pattern(kPatterns, index % options.classes);
  SampleRandom noise(mix_seed(0, 0), index);
  for (std::int64_t i = 0; i < options.shape.values(); ++i)
    into[i] = static_cast<std::uint8_t>((pattern() % 256 + noise() % 256) / 2);
}

}  // namespace

std::shared_ptr<const ImageSource> synthetic_images(const SyntheticOptions& o) {
  if (o.samples < 1 || o.classes < 1 || o.shape.channels < 1 || o.shape.height < 1 || o.shape.width < 1)
    throw UsageError({.what = concat("synthetic data of ", o.samples, " samples, ", o.shape.channels, " x ",
                                     o.shape.height, " x ", o.shape.width, " values, ", o.classes, " classes"),
                      .next = "give at least 1 of each"});
  const torch::Tensor images =
      torch::empty({o.samples, o.shape.channels, o.shape.height, o.shape.width}, torch::kUInt8);
  auto* into = images.data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < o.samples; ++i) write_synthetic(o, i, into + i * o.shape.values());
  return std::make_shared<MemoryImages>("synthetic", images, torch::arange(o.samples).remainder(o.classes), o.classes,
                                        "synthetic");
}

}  // namespace lockstep
