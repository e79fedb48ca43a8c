// SPDX-License-Identifier: Apache-2.0
// tests/data/files.h: files of every format that is read, written as their own tools write them.
#pragma once

#include <png.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/base/files/file.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"
#include "tests/data/encode_jpeg.h"

namespace lockstep::testing {

// 0, 1, ..., count - 1
inline std::vector<int64_t> first_indices(int64_t count) {
  std::vector<int64_t> indices(to_size(count));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

// RGB pixels (height, width, 3): waves that a JPEG keeps well, different for each seed.
inline std::vector<uint8_t> smooth_pixels(int64_t height, int64_t width, uint64_t seed) {
  SampleRandom random(seed, 0);
  double frequency[3][2];
  for (auto& channel : frequency)
    for (double& value : channel) value = random.uniform(0.01, 0.1);
  std::vector<uint8_t> pixels;
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x)
      for (const auto& channel : frequency)
        pixels.push_back(static_cast<uint8_t>(
            127.5 + 120 * std::sin(static_cast<double>(y) * channel[0] + static_cast<double>(x) * channel[1])));
  return pixels;
}

inline std::vector<uint8_t> encode_png(const std::vector<uint8_t>& pixels, int64_t height, int64_t width,
                                       png_uint_32 format = PNG_FORMAT_RGB) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = static_cast<png_uint_32>(height);
  image.width = static_cast<png_uint_32>(width);
  image.format = format;
  png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::vector<uint8_t> file(bytes);
  if (png_image_write_to_memory(&image, file.data(), &bytes, 0, pixels.data(), 0, nullptr) == 0)
    throw DataError({.what = image.message});
  file.resize(bytes);
  return file;
}

inline void write_bytes(const std::filesystem::path& path, const std::vector<uint8_t>& bytes) {
  std::filesystem::create_directories(path.parent_path());
  write_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

inline std::string npy_text(const std::string& descr, const std::string& shape, const std::string& values,
                            bool fortran = false) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  const std::string length{static_cast<char>(header.size() & 0xFF), static_cast<char>(header.size() >> 8)};
  return std::string("\x93NUMPY\x01\x00", 8) + length + header + values;
}

// FOLDER/a and FOLDER/b with `each` images, JPEG and PNG in turn, of several sizes.
inline void write_image_folder(const std::filesystem::path& folder, int each, int64_t edge = 40) {
  for (int label = 0; label < 2; ++label)
    for (int i = 0; i < each; ++i) {
      const int64_t height = edge + 3 * i;
      const int64_t width = edge + 5 * label + i;
      const auto pixels = smooth_pixels(height, width, static_cast<uint64_t>(2 * i + label));
      const auto path = folder / (label == 0 ? "a" : "b") / std::to_string(i);
      if (i % 2 == 0)
        write_bytes(path.string() + ".jpg", encode_jpeg(pixels, height, width, 90));
      else
        write_bytes(path.string() + ".PNG", encode_png(pixels, height, width));
    }
}

}  // namespace lockstep::testing
