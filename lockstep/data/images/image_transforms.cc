// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/image_transforms.h"

#include <algorithm>
#include <random>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

float of_channel(const std::vector<float>& values, int64_t channel) {
  return values.size() == 1 ? values[0] : values[to_size(channel)];
}

// Maps values in [0, most] to normalised ones.
Normalisation normalisation_from(const ImageTransforms& transforms, int64_t channels, float most) {
  Normalisation result;
  for (int64_t c = 0; c < channels; ++c) {
    const float deviation = of_channel(transforms.deviation, c);
    result.scale[c] = 1 / (most * deviation);
    result.shift[c] = -of_channel(transforms.mean, c) / deviation;
  }
  return result;
}

float draw_factor(float range, SampleRandom& random) {
  return static_cast<float>(random.uniform(std::max(0.F, 1 - range), 1 + range));
}

// Drawn in this order.
ColourChange draw_colours(const ImageTransforms& t, SampleRandom& random) {
  return {.brightness = draw_factor(t.brightness, random),
          .contrast = draw_factor(t.contrast, random),
          .saturation = draw_factor(t.saturation, random),
          .hue = static_cast<float>(random.uniform(-t.hue, t.hue))};
}

Box middle(double width, double height, const Box& whole) {
  return {(whole.width - width) / 2, (whole.height - height) / 2, width, height};
}

// Stored pixels per pixel of the image resized to shorter_edge.
double edge_scale(const ImageTransforms& t, const Box& whole) {
  if (t.shorter_edge == 0) return 1;
  return std::min(whole.height, whole.width) / to_double(t.shorter_edge);
}

Box centre_box(const ImageTransforms& t, const Box& whole) {
  const double scale = edge_scale(t, whole);
  Box box = middle(to_double(t.width) * scale, to_double(t.height) * scale, whole);
  if (scale == 1) {
    box.left = std::floor(box.left);
    box.top = std::floor(box.top);
  }
  return box;
}

Box random_box(const ImageTransforms& t, const Box& whole, SampleRandom& random) {
  const double scale = edge_scale(t, whole);
  const auto draw = [&](double size, int64_t wanted) {
    const int64_t room = std::lround(size / scale) + 2 * t.padding - wanted;
    if (room < 0) return -std::floor(to_double(-room) / 2) * scale;  // smaller than the crop: centred in it
    return to_double(random.below(room + 1) - t.padding) * scale;
  };
  const double top = draw(whole.height, t.height);
  const double left = draw(whole.width, t.width);
  return {left, top, to_double(t.width) * scale, to_double(t.height) * scale};
}

// Draws area and aspect ratio until the box fits, ten times at most, as torchvision's RandomResizedCrop does.
Box random_resized_box(const ImageTransforms& t, const Box& whole, SampleRandom& random) {
  constexpr int kTries = 10;
  constexpr double kMostStretch = 4.0 / 3;
  for (int i = 0; i < kTries; ++i) {
    const double wanted = whole.height * whole.width * random.uniform(t.least_area, 1);
    const double aspect = std::exp(random.uniform(-std::log(kMostStretch), std::log(kMostStretch)));
    const double width = std::round(std::sqrt(wanted * aspect)), height = std::round(std::sqrt(wanted / aspect));
    if (width < 1 || height < 1 || width > whole.width || height > whole.height) continue;
    const double top = std::floor(random.uniform() * (whole.height - height + 1));
    const double left = std::floor(random.uniform() * (whole.width - width + 1));
    return {left, top, width, height};
  }
  // No box fits a very long image: take its middle, with the nearest aspect ratio that is allowed.
  return middle(std::min(whole.width, whole.height * kMostStretch), std::min(whole.height, whole.width * kMostStretch),
                whole);
}

Box draw_box(const ImageTransforms& t, const Box& whole, SampleRandom& random) {
  if (t.crop == Crop::kCentre) return centre_box(t, whole);
  if (t.crop == Crop::kRandom) return random_box(t, whole, random);
  if (t.crop == Crop::kRandomResized) return random_resized_box(t, whole, random);
  return whole;
}

}  // namespace

ImageShape output_shape(const ImageTransforms& t, const ImageShape& stored) {
  return {stored.channels, t.height > 0 ? t.height : stored.height, t.width > 0 ? t.width : stored.width};
}

void check_transforms(const ImageTransforms& t, int64_t channels) {
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw UsageError({.what = what, .likely = "--augment, or the ImageTransforms of the dataset"});
  };
  const auto fits = [&](const std::vector<float>& values) {
    return values.size() == 1 || std::ssize(values) == channels;
  };
  require(channels >= 1 && channels <= Normalisation::kMaxChannels,
          concat("images of ", channels, " channels; 1 to ", Normalisation::kMaxChannels, " can be transformed"));
  require(fits(t.mean) && fits(t.deviation), concat("mean and deviation need 1 or ", channels, " values"));
  for (const float deviation : t.deviation) require(deviation > 0, "a deviation is not positive");
  require(std::min({t.height, t.width, t.padding, t.shorter_edge}) >= 0, "a size is negative");
  require(t.brightness >= 0 && t.contrast >= 0 && t.saturation >= 0 && t.hue >= 0 && t.mixup >= 0,
          "jitter or mixup is negative");
  require(t.crop == Crop::kNone || (t.height > 0 && t.width > 0), "a crop needs the size of its result");
  require(0 < t.least_area && t.least_area <= 1, "areas lie in (0, 1]");
  require(t.hue <= 0.5F, "jitter of the hue is at most 0.5");
}

ImageTransforms without_augmentation(ImageTransforms t) {
  if (t.crop == Crop::kRandomResized) {
    t.crop = Crop::kCentre;
    t.shorter_edge = std::min(t.height, t.width) * 8 / 7;
  } else if (t.crop == Crop::kRandom) {
    t.crop = Crop::kCentre;
  }
  t.padding = 0;
  t.flip = false;
  t.brightness = t.contrast = t.saturation = t.hue = 0;
  t.mixup = 0;
  t.one_hot = false;
  return t;
}

Placement draw_placement(const ImageTransforms& t, const ImageShape& stored, SampleRandom& random) {
  const ImageShape shape = output_shape(t, stored);
  Placement placement{.box = draw_box(t, whole_image(stored), random), .height = shape.height, .width = shape.width};
  placement.flip = t.flip && random.coin();
  return placement;
}

void apply_transforms(const ImageTransforms& t, const ImageView& image, const Placement& placement,
                      SampleRandom& random, float* into) {
  const int64_t channels = image.shape.channels;
  const bool jitter = t.brightness > 0 || t.contrast > 0 || t.saturation > 0 || t.hue > 0;
  if (!jitter) return resize_image(image, placement, normalisation_from(t, channels, 255), into);
  const ImageShape shape{channels, placement.height, placement.width};
  Normalisation to_unit;
  std::fill_n(to_unit.scale, channels, 1.F / 255);
  resize_image(image, placement, to_unit, into);
  change_colours(into, shape, draw_colours(t, random));
  normalise(into, shape, normalisation_from(t, channels, 1));
}

double draw_share(double alpha, SampleRandom& random) {
  std::gamma_distribution<double> gamma(alpha, 1);
  const double a = gamma(random);
  const double b = gamma(random);
  return a + b > 0 ? a / (a + b) : 0.5;
}

}  // namespace lockstep
