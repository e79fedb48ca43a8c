// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/data/formats/readers.h"

namespace lockstep {
namespace {

using Parts = std::vector<std::string>;

[[noreturn]] void refuse(const Parts& parts, const std::string& why) {
  throw UsageError({.what = concat("--augment does not know '", join(parts, ":"), "': ", why),
                    .next = "resize, crop, center-crop, random-resized-crop, flip, jitter, mixup, one-hot, normalise"});
}

double number(const Parts& parts, size_t at, double otherwise) {
  if (at >= parts.size()) return otherwise;
  if (!parse_number(parts[at], otherwise)) refuse(parts, concat("'", parts[at], "' is not a number"));
  return otherwise;
}

int64_t whole(const Parts& parts, size_t at, int64_t otherwise) {
  const double value = number(parts, at, static_cast<double>(otherwise));
  if (value < 0 || value > 1e6 || value != std::floor(value)) refuse(parts, "a whole number is needed");
  return static_cast<int64_t>(value);
}

void parse_size(const Parts& parts, ImageTransforms& t) {
  if (parts.size() < 2) refuse(parts, "it needs a size, such as :224");
  const Parts sides = split(parts[1], 'x');
  t.height = whole(sides, 0, 0);
  t.width = whole(sides, sides.size() > 1 ? 1 : 0, 0);
  if (t.height < 1 || t.width < 1) refuse(parts, "a size of at least 1 is needed");
}

std::vector<float> parse_channels(const std::string& text) {
  const Parts texts = split(text, '+');
  std::vector<float> values;
  for (size_t i = 0; i < texts.size(); ++i) values.push_back(static_cast<float>(number(texts, i, 0)));
  return values;
}

void parse_one(const Parts& parts, ImageTransforms& t) {
  const std::string& name = parts[0];
  if (name == "resize") {
    parse_size(parts, t);
  } else if (name == "crop") {
    t.crop = Crop::kRandom;
    t.padding = whole(parts, 1, 4);
  } else if (name == "center-crop") {
    parse_size(parts, t);
    t.crop = Crop::kCentre;
    t.shorter_edge = whole(parts, 2, 0);
  } else if (name == "random-resized-crop") {
    parse_size(parts, t);
    t.crop = Crop::kRandomResized;
    t.least_area = number(parts, 2, t.least_area);
  } else if (name == "flip") {
    t.flip = true;
  } else if (name == "jitter") {
    t.brightness = static_cast<float>(number(parts, 1, 0.4));
    t.contrast = static_cast<float>(number(parts, 2, t.brightness));
    t.saturation = static_cast<float>(number(parts, 3, t.brightness));
    t.hue = static_cast<float>(number(parts, 4, 0));
  } else if (name == "mixup") {
    t.mixup = number(parts, 1, 0.2);
  } else if (name == "one-hot") {
    t.one_hot = true;
  } else if (name == "normalise") {
    if (parts.size() != 3) refuse(parts, "it is normalise:MEAN:DEVIATION");
    t.mean = parse_channels(parts[1]);
    t.deviation = parse_channels(parts[2]);
  } else {
    refuse(parts, "no such transform");
  }
}

}  // namespace

ImageTransforms parse_transforms(const std::string& text, ImageTransforms base) {
  if (text.empty()) return base;
  for (const std::string& part : split(text, ',')) parse_one(split(part, ':'), base);
  return base;
}

}  // namespace lockstep
