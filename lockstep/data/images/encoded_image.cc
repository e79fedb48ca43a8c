// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/encoded_image.h"

#include <png.h>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

bool begins_with(ByteView file, std::string_view magic) {
  return std::string_view(reinterpret_cast<const char*>(file.data()), file.size()).starts_with(magic);
}

// libpng's simplified interface: any colour type, depth and interlacing becomes 8-bit RGB.
class PngReader {
 public:
  explicit PngReader(ByteView file) {
    image_.version = PNG_IMAGE_VERSION;
    if (png_image_begin_read_from_memory(&image_, file.data(), file.size()) == 0)
      throw damaged_image("PNG", image_.message);
    image_.format = PNG_FORMAT_RGB;
  }
  ~PngReader() { png_image_free(&image_); }
  PngReader& operator=(PngReader&&) = delete;

  ImageShape shape() const { return {3, image_.height, image_.width}; }

  ImageView read(DecodeScratch& scratch) {
    scratch.resize(to_size(shape().values()));
    const png_color black{};
    if (png_image_finish_read(&image_, &black, scratch.data(), 0, nullptr) == 0)
      throw damaged_image("PNG", image_.message);
    return interleaved(scratch.data(), shape());
  }

 private:
  png_image image_{};
};

ImageShape shape_of(ByteView file) {
  if (is_jpeg(file)) return jpeg_shape(file);
  if (begins_with(file, "\x89PNG\r\n\x1A\n")) return PngReader(file).shape();
  throw DataError(
      {.what = concat("neither JPEG nor PNG (", file.size(), " bytes)"), .likely = "another format, or an empty file"});
}

}  // namespace

DataError damaged_image(const char* format, const std::string& why) {
  return DataError({.what = concat("damaged ", format, ": ", why), .likely = "a file that was cut off or overwritten"});
}

bool is_jpeg(ByteView file) { return begins_with(file, "\xFF\xD8\xFF"); }

ImageShape encoded_shape(ByteView file, const std::string& origin) try {
  const ImageShape shape = shape_of(file);
  if (shape.height < 1 || shape.width < 1 || shape.height * shape.width > kMostPixels)
    throw DataError(
        {.what = concat("an image of ", shape.width, " x ", shape.height, " pixels"), .likely = "a damaged header"});
  return shape;
} catch (const DataError& error) {
  ErrorText text = error.text();
  text.here = origin;
  throw DataError(text);
}

ImageView decode_image(ByteView file, Placement& placement, DecodeScratch& scratch) {
  return is_jpeg(file) ? decode_jpeg(file, placement, scratch) : PngReader(file).read(scratch);
}

}  // namespace lockstep
