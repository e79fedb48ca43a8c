// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/image_kernels.h"

#include <algorithm>
#include <iterator>

#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

// The innermost loops run over consecutive values without branches, so that the compiler vectorises them.

template <ptrdiff_t Stride>
void convert(const uint8_t* __restrict from, int64_t count, float scale, float shift, float* __restrict into) {
  for (int64_t i = 0; i < count; ++i) into[i] = std::fma(static_cast<float>(from[i * Stride]), scale, shift);
}

// `count` pixels of a row; `from` is the leftmost one.
void convert_row(const uint8_t* from, ptrdiff_t stride, int64_t count, bool flip, float scale, float shift,
                 float* into) {
  const uint8_t* last = from + (count - 1) * stride;
  if (stride == 1)
    return flip ? convert<-1>(last, count, scale, shift, into) : convert<1>(from, count, scale, shift, into);
  return flip ? convert<-3>(last, count, scale, shift, into) : convert<3>(from, count, scale, shift, into);
}

bool whole_plane(const ImageView& image, const Placement& placement) {
  return image.pixel_stride == 1 && image.row_stride == image.shape.width && !placement.flip &&
         placement.box.left == 0 && placement.box.top == 0 && placement.width == image.shape.width &&
         placement.height == image.shape.height;
}

// The part of [begin, begin + length) that is in [0, limit), counted from `begin`.
Range inside(int64_t begin, int64_t length, int64_t limit) {
  const int64_t first = std::clamp<int64_t>(-begin, 0, length);
  return {first, std::clamp<int64_t>(limit - begin, first, length)};
}

// Row by row: zeros (which become `shift`) left of the image, its pixels, zeros right of it; whole rows of zeros above
// and below. With `flip` the pixels and both borders are mirrored.
void copy_plane(const ImageView& image, const Placement& placement, const uint8_t* plane, float scale, float shift,
                float* into) {
  const auto left = static_cast<int64_t>(placement.box.left);
  const auto top = static_cast<int64_t>(placement.box.top);
  const Range rows = inside(top, placement.height, image.shape.height);
  const Range columns = inside(left, placement.width, image.shape.width);
  const int64_t width = placement.width;
  const int64_t first = placement.flip ? width - columns.end : columns.begin;
  const int64_t count = columns.size();
  for (int64_t y = 0; y < placement.height; ++y, into += width) {
    if (y < rows.begin || y >= rows.end) {
      std::fill_n(into, width, shift);
      continue;
    }
    std::fill_n(into, first, shift);
    convert_row(plane + (top + y) * image.row_stride + (left + columns.begin) * image.pixel_stride, image.pixel_stride,
                count, placement.flip, scale, shift, into + first);
    std::fill_n(into + first + count, width - first - count, shift);
  }
}

void copy_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into) {
  const int64_t plane = placement.height * placement.width;
  for (int64_t c = 0; c < image.shape.channels; ++c, into += plane) {
    const uint8_t* pixels = image.pixels + c * image.channel_stride;
    if (whole_plane(image, placement))
      convert<1>(pixels, plane, normalisation.scale[c], normalisation.shift[c], into);
    else
      copy_plane(image, placement, pixels, normalisation.scale[c], normalisation.shift[c], into);
  }
}

// Along one axis: the source pixels that each pixel of the result is a weighted mean of.
struct Taps {
  struct Pixel {
    int32_t begin;  // first source pixel
    int32_t count;
  };
  std::vector<Pixel> pixels;   // one for each result pixel
  std::vector<float> weights;  // `stride` of them for each result pixel
  int64_t stride = 0;

  const float* weights_of(int64_t result) const { return weights.data() + result * stride; }
};

// The weights of result pixel i form a triangle: its tip is at `centre`, its half width `support` is a result pixel in
// source pixels, but at least one (enlarging then interpolates between neighbours). The source pixels whose centres lie
// under it are [begin, end), cut at the image's edges; their weights are divided by their sum, so an edge does not
// darken the image. The same numbers as Pillow's precompute_coeffs for its BILINEAR filter.
void compute_taps(double from, double length, int64_t limit, int64_t results, Taps& taps) {
  const double scale = length / to_double(results);
  const double support = std::max(scale, 1.0);
  taps.stride = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  taps.pixels.clear();
  taps.weights.assign(to_size(results * taps.stride), 0.F);
  for (int64_t i = 0; i < results; ++i) {
    const double centre = std::clamp(from + (to_double(i) + 0.5) * scale, 0.0, to_double(limit));
    const auto begin = std::clamp<int64_t>(std::lround(std::floor(centre - support + 0.5)), 0, limit - 1);
    const auto end = std::clamp<int64_t>(std::lround(std::floor(centre + support + 0.5)), begin + 1, limit);
    float* weights = taps.weights.data() + i * taps.stride;
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) {
      const double distance = std::abs((to_double(k) + 0.5 - centre) / support);
      weights[k - begin] = static_cast<float>(std::max(0.0, 1.0 - distance));
      sum += weights[k - begin];
    }
    if (sum <= 0) sum = weights[0] = 1;
    for (int64_t k = 0; k < end - begin; ++k) weights[k] = static_cast<float>(weights[k] / sum);
    taps.pixels.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)});
  }
}

// row[i] (+)= weight * bytes[i]
void weigh_first(const uint8_t* __restrict bytes, int64_t count, float weight, float* __restrict row) {
  for (int64_t i = 0; i < count; ++i) row[i] = weight * static_cast<float>(bytes[i]);
}
void weigh_next(const uint8_t* __restrict bytes, int64_t count, float weight, float* __restrict row) {
  for (int64_t i = 0; i < count; ++i) row[i] = std::fma(weight, static_cast<float>(bytes[i]), row[i]);
}

// The horizontal half of a resize: one row of the result from `row`, a row of floats whose first pixel is source column
// `first`, `Channels` values to a pixel. Writes channel c of result column x to into[c * plane + x], mirrored if `flip`.
template <int Channels>
void resize_row(const float* row, int64_t first, const Taps& taps, bool flip, const float* scale, const float* shift,
                int64_t plane, float* into) {
  const auto results = std::ssize(taps.pixels);
  const Taps::Pixel* tap = taps.pixels.data();
  for (int64_t x = 0; x < results; ++x, ++tap) {
    const float* weights = taps.weights_of(x);
    const float* pixel = row + (tap->begin - first) * Channels;
    float sum[Channels] = {};
    for (int32_t k = 0; k < tap->count; ++k, pixel += Channels)
      for (int c = 0; c < Channels; ++c) sum[c] += weights[k] * pixel[c];
    const int64_t place = flip ? results - 1 - x : x;
    for (int c = 0; c < Channels; ++c) into[c * plane + place] = std::fma(sum[c], scale[c], shift[c]);
  }
}

struct ResizeScratch {
  Taps rows;
  Taps columns;
  std::vector<float> row;
};

// Resizes `Channels` channels that are interleaved in the source, from `pixels` on. The filter is separable, so each
// row of the result takes two passes: the source rows under its vertical triangle are weighed and summed into one row
// of floats (only the columns that any result pixel needs; 4 bytes each, so the row stays in the L1 cache), then
// resize_row does the same horizontally. Weighing whole rows first is what the compiler can vectorise.
template <int Channels>
void resize_channels(const ImageView& image, const uint8_t* pixels, const Placement& placement, const float* scale,
                     const float* shift, ResizeScratch& scratch, float* into) {
  const Taps& columns = scratch.columns;
  const int64_t first = columns.pixels.front().begin;
  const int64_t count = (columns.pixels.back().begin + columns.pixels.back().count - first) * Channels;
  scratch.row.resize(to_size(count));
  const Taps::Pixel* tap = scratch.rows.pixels.data();
  for (int64_t y = 0; y < placement.height; ++y, ++tap) {
    const float* weights = scratch.rows.weights_of(y);
    const uint8_t* source = pixels + tap->begin * image.row_stride + first * Channels;
    weigh_first(source, count, weights[0], scratch.row.data());
    for (int32_t k = 1; k < tap->count; ++k)
      weigh_next(source + k * image.row_stride, count, weights[k], scratch.row.data());
    resize_row<Channels>(scratch.row.data(), first, columns, placement.flip, scale, shift,
                         placement.height * placement.width, into + y * placement.width);
  }
}

float clamp01(float value) { return std::clamp(value, 0.F, 1.F); }

// pixels = factor * pixels + (1 - factor) * other, in [0, 1]
void blend(float* pixels, int64_t count, float factor, float other) {
  const float add = (1 - factor) * other;
  for (int64_t i = 0; i < count; ++i) pixels[i] = clamp01(pixels[i] * factor + add);
}

constexpr float kRed = 0.2989F;  // ITU-R BT.601, as torchvision rounds it
constexpr float kGreen = 0.587F;
constexpr float kBlue = 0.114F;

// Summed plane by plane in float, as torchvision does it.
float mean_grey(const float* pixels, const ImageShape& shape) {
  const int64_t plane = shape.height * shape.width;
  double sums[3] = {};
  for (int64_t c = 0; c < std::min<int64_t>(shape.channels, 3); ++c) {
    float sum = 0;
    for (int64_t i = 0; i < plane; ++i) sum += pixels[c * plane + i];
    sums[c] = sum / to_double(plane);
  }
  return static_cast<float>(shape.channels < 3 ? sums[0] : kRed * sums[0] + kGreen * sums[1] + kBlue * sums[2]);
}

void change_saturation(float* red, float* green, float* blue, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    const float grey = (1 - factor) * (kRed * red[i] + kGreen * green[i] + kBlue * blue[i]);
    red[i] = clamp01(red[i] * factor + grey);
    green[i] = clamp01(green[i] * factor + grey);
    blue[i] = clamp01(blue[i] * factor + grey);
  }
}

// Through HSV (Smith, "Color gamut transform pairs", 1978). Hue is measured in sixths of a turn. After the turn each
// channel is value - chroma * d, where d in [0, 1] is how far the hue is from that channel's third of the circle. 12 is
// added so that fmod gets a positive number; grey pixels (chroma 0) have no hue and stay.
void change_hue(float* red, float* green, float* blue, int64_t count, float turn) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::max({red[i], green[i], blue[i]});
    const float chroma = value - std::min({red[i], green[i], blue[i]});
    if (chroma <= 0) continue;
    float hue = value == red[i]     ? (green[i] - blue[i]) / chroma
                : value == green[i] ? 2 + (blue[i] - red[i]) / chroma
                                    : 4 + (red[i] - green[i]) / chroma;
    hue += 6 * turn + 12;
    const auto channel = [&](float offset) {
      const float k = std::fmod(hue + offset, 6.F);
      return value - chroma * std::max(0.F, std::min({k, 4 - k, 1.F}));
    };
    red[i] = channel(5);
    green[i] = channel(3);
    blue[i] = channel(1);
  }
}

}  // namespace

void resize_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into) {
  if (placement.is_copy()) return copy_image(image, placement, normalisation, into);
  static thread_local ResizeScratch scratch;
  compute_taps(placement.box.top, placement.box.height, image.shape.height, placement.height, scratch.rows);
  compute_taps(placement.box.left, placement.box.width, image.shape.width, placement.width, scratch.columns);
  if (image.pixel_stride == 3)
    return resize_channels<3>(image, image.pixels, placement, normalisation.scale, normalisation.shift, scratch, into);
  for (int64_t c = 0; c < image.shape.channels; ++c)
    resize_channels<1>(image, image.pixels + c * image.channel_stride, placement, normalisation.scale + c,
                       normalisation.shift + c, scratch, into + c * placement.height * placement.width);
}

void change_colours(float* pixels, const ImageShape& shape, const ColourChange& change) {
  const int64_t plane = shape.height * shape.width;
  if (change.brightness != 1) blend(pixels, shape.values(), change.brightness, 0);
  if (change.contrast != 1) blend(pixels, shape.values(), change.contrast, mean_grey(pixels, shape));
  if (shape.channels != 3) return;
  if (change.saturation != 1) change_saturation(pixels, pixels + plane, pixels + 2 * plane, plane, change.saturation);
  if (change.hue != 0) change_hue(pixels, pixels + plane, pixels + 2 * plane, plane, change.hue);
}

void normalise(float* values, const ImageShape& shape, const Normalisation& normalisation) {
  const int64_t plane = shape.height * shape.width;
  for (int64_t c = 0; c < shape.channels; ++c, values += plane) {
    const float scale = normalisation.scale[c];
    const float shift = normalisation.shift[c];
    for (int64_t i = 0; i < plane; ++i) values[i] = std::fma(values[i], scale, shift);
  }
}

void mix_into(float* into, const float* other, float share, int64_t count) {
  for (int64_t i = 0; i < count; ++i) into[i] = share * into[i] + (1 - share) * other[i];
}

}  // namespace lockstep
