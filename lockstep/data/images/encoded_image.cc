// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/encoded_image.h"

#include "lockstep/base/text.h"
#include "lockstep/data/images/jpeg.h"
#include "lockstep/data/images/png_image.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

bool begins_with(std::span<const std::uint8_t> file, std::span<const std::uint8_t> magic) {
  return file.size() >= magic.size() && std::equal(magic.begin(), magic.end(), file.begin());
}

ImageShape shape_of(std::span<const std::uint8_t> file) {
  if (is_jpeg(file)) return jpeg_shape(file);
  if (is_png(file)) return png_shape(file);
  throw DataError({.what = concat("neither JPEG nor PNG (", file.size(), " bytes)"),
                   .likely = "another format, or an empty file",
                   .next = "convert it, or leave such samples out with --skip-bad N"});
}

}  // namespace

DataError damaged_image(const char* format, const std::string& why) {
  return DataError({.what = concat("damaged ", format, ": ", why),
                    .likely = "a file that was cut off or overwritten",
                    .next = "fetch it again, or leave such samples out with --skip-bad N"});
}

bool is_jpeg(std::span<const std::uint8_t> file) {
  static constexpr std::uint8_t kMagic[] = {0xFF, 0xD8, 0xFF};
  return begins_with(file, kMagic);
}

bool is_png(std::span<const std::uint8_t> file) {
  static constexpr std::uint8_t kMagic[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
  return begins_with(file, kMagic);
}

ImageShape encoded_shape(std::span<const std::uint8_t> file, const std::string& origin) try {
  const ImageShape shape = shape_of(file);
  if (shape.height < 1 || shape.width < 1 || shape.height * shape.width > kMostPixels)
    throw DataError({.what = concat("an image of ", shape.width, " x ", shape.height, " pixels"),
                     .likely = "a damaged header",
                     .next = "leave such samples out with --skip-bad N"});
  return shape;
} catch (const DataError& error) {
  ErrorText text = error.text();
  text.here = origin;
  throw DataError(text);
}

ImageView decode_image(std::span<const std::uint8_t> file, Placement& placement, DecodeScratch& scratch) {
  return is_jpeg(file) ? decode_jpeg(file, placement, scratch) : decode_png(file, scratch);
}

}  // namespace lockstep
